"""A prompt of an exact number of tokens: one sentence to be found again, in the middle of text that says nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from launcher.errors import Exit, LauncherError

FILLER = (
    "The river passes the old mill and turns north behind the wood. In the morning there is mist on the fields, and "
    "by noon the wind has taken it away. Carts come along the road with hay and with stones for the new wall. "
    "Somebody opens a window, looks at the sky, and closes it again. The path to the lake is dry in summer and wet in "
    "spring. Behind the houses stand apple trees, and under the trees a bench for two. When the bell rings, the "
    "children run home and the dog runs with them. At night the lamps along the water are lit one after the other."
).split()
# One token in any vocabulary that has learned from English.
PAD = "and"
MOST_PADS = 8
ROUNDS = 4


def make(needle: str, question: str, tokens: int, count: Callable[[str], int]) -> str:
    """`count` gives a prompt's tokens with all that the chat template adds."""
    shortest = count(text_of(needle, question, 0, 0))
    if shortest <= tokens:
        words, pads = most_words(tokens, shortest, lambda words: count(text_of(needle, question, words, 0)))
        for _ in range(ROUNDS):  # one, where a pad is one token
            text = text_of(needle, question, words, pads)
            missing = tokens - count(text)
            if missing == 0:
                return text
            pads = max(0, pads + missing)
    raise LauncherError(
        f"canary: no prompt of {tokens:,} tokens could be made for {question!r}, the shortest has {shortest:,}; "
        f"give that question another number of tokens.",
        Exit.SERVER,
    )


def most_words(tokens: int, shortest: int, count: Callable[[int], int]) -> tuple[int, int]:
    """(as many words as are not too many, the few tokens that are missing then)"""
    words, missing, too_many = 0, tokens - shortest, tokens - shortest + 1  # a word is a token at least
    per_word = 1.0
    by_halves = False  # every second time, which always comes to an end; else by what a word was so far
    while missing > MOST_PADS and too_many - words > 1:
        step = (too_many - words) // 2 if by_halves else int(missing / per_word)
        guess = min(max(words + step, words + 1), too_many - 1)
        got = count(guess)
        per_word, by_halves = max((got - shortest) / guess, 1.0), not by_halves
        if got > tokens:
            too_many = guess
        else:
            words, missing = guess, tokens - got
    return words, missing


def text_of(needle: str, question: str, words: int, pads: int) -> str:
    filler = list(itertools.islice(itertools.cycle(FILLER), words))
    middle = words // 2
    return f"{' '.join([*filler[:middle], needle, *filler[middle:], *[PAD] * pads])}\n\n{question}"
