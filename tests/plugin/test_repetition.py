"""The rule for answers that run into loops: what has to fire, what must not, and what it may cost."""

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_exl3 import repetition
from vllm_exl3.repetition import LEAST_LENGTH, LEAST_ROUNDS, LONGEST_CYCLE, WINDOW, Tail, cycle_of

# What a damaged state says: pieces of many languages, one after the other.
PIECES = ("the ", "!!", "assistant", " не", "的", "\n\n", "{}", "0x", " apolog", "ise", " I", "</", "��", " Let me ")


def soup(rng: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += rng.choice(PIECES)
    return text[:length]


def grown(text: str, rng: random.Random) -> Tail:
    """The tail after the text came in pieces of any size, as a stream brings it."""
    tail = Tail()
    while text:
        size = rng.choice((1, 2, 5, 30, 5000))
        tail.add(text[:size])
        text = text[size:]
    return tail


def by_definition(text: str) -> int:
    """Every cycle, every character, as the rule is written down."""
    for cycle in range(1, LONGEST_CYCLE + 1):
        length = max(LEAST_ROUNDS * cycle, LEAST_LENGTH)
        if length <= len(text):
            end = text[len(text) - length :]
            if all(end[i] == end[i + cycle] for i in range(length - cycle)):
                return cycle
    return 0


# Fires


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, LONGEST_CYCLE), st.integers(0, 3000))
def test_a_cycle_of_soup_fires_whatever_came_before_and_wherever_it_stands(seed, length, before):
    rng = random.Random(seed)
    cycle = soup(rng, length)
    rounds = max(LEAST_ROUNDS * length, LEAST_LENGTH) // length + 2
    text = soup(rng, before) + cycle * rounds + cycle[: rng.randrange(length)]
    found = cycle_of(grown(text, rng).text)
    assert found and length % found == 0  # a soup may repeat itself inside


@pytest.mark.parametrize("cycle", ["!", " the", "\n", "我", "I apologise for the confusion. Let me try again.\n\n"])
def test_well_known_loops_fire(cycle):
    assert cycle_of(cycle * LEAST_LENGTH) == len(cycle)


@settings(max_examples=30, deadline=None)
@given(st.text("ab", max_size=30), st.integers(1, 120), st.text("ab", max_size=3))
def test_it_is_the_rule_as_written_down(cycle, rounds, end):
    text = (cycle * (rounds + 40) + end)[-WINDOW:]
    assert cycle_of(text) == by_definition(text)


def test_a_loop_that_ended_is_no_loop():
    assert cycle_of("again " * 300) == 6
    assert cycle_of("again " * 300 + "and this is how it was.") == 0


# Does not fire

WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=9)
LINES = st.lists(WORDS, min_size=1, max_size=8).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(LINES, st.integers(1, 12))
def test_code_with_repeated_lines_does_not_fire(line, times):
    block = ("    " + line[:55] + "\n") * times
    assert cycle_of("def f():\n" + block) == 0
    assert cycle_of("".join(f"def f{n}():\n{block}\n" for n in range(9))) == 0


def test_without_a_least_length_code_would_fire(monkeypatch):
    monkeypatch.setattr(repetition, "LEAST_LENGTH", 0)
    assert cycle_of("def f():\n" + "    total += values[i]\n" * 5)


@settings(max_examples=30, deadline=None)
@given(LINES, st.integers(2, 200))
def test_a_numbered_list_does_not_fire(line, length):
    assert cycle_of("".join(f"{n}. {line}\n" for n in range(length))) == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(WORDS, st.integers(0, 9)), min_size=1, max_size=60, unique=True), st.integers(1, 120))
def test_a_table_does_not_fire(rows, ruler):
    text = "| name | value |\n|" + "-" * ruler + "|" + "-" * ruler + "|\n"
    assert cycle_of(text + "".join(f"| {name} | {value} | 0 | 0 | 0 |\n" for name, value in rows)) == 0


@pytest.mark.parametrize("name", ["launcher/table.py", "docs/local.md", "LICENSE", "models/local/config.json"])
def test_no_end_of_real_text_fires(name, request):
    text = (request.config.rootpath / name).read_text()[:8_000]
    assert [end for end in range(0, len(text), 97) if cycle_of(text[max(0, end - WINDOW) : end])] == []


# Costs


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3 * WINDOW), max_size=20))
def test_a_tail_keeps_the_end_and_no_more_than_twice_the_window(sizes):
    rng, tail, text = random.Random(1), Tail(), ""
    for size in sizes:
        piece = "".join(rng.choices("abc", k=min(size, 50))) * (size // 50 + 1)
        tail.add(piece)
        text += piece
        assert len(tail.text) <= 2 * WINDOW
        assert tail.text.endswith(text[-WINDOW:])
