"""How improbable was what an engine said? Every answer, scored by a second engine that reads it whole and alone.

Where it looks improbable, the judge reads again with noise as of rounding (rounding.py); its kindest reading counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

TIMES_THE_FLOOR = 3
# A floor of a few turns may be zero, where nothing came near a tie. Logits of 8 to 16 are 1/16 apart in bf16.
LEAST_FLOOR = 1 / 16
# The plain arm must not lift the bar by being broken itself.
HIGHEST_FLOOR = 0.5
# Below every bar: such a margin needs no second reading, and a reading that comes down to it ends the question.
UNSUSPICIOUS = TIMES_THE_FLOOR * LEAST_FLOOR
NOISY_READINGS = 24
# Ties are rare. An answer with more bad tokens than this is wrong, and reading it again would only cost time.
MOST_SUSPECTS, MOST_SUSPECTS_SHARE = 6, 0.05
NAN = float("nan")


@dataclass(frozen=True)
class Answer:
    session: str
    turn: int
    prompt: list[int]
    tokens: list[int]
    cached: int | None = None  # tokens of the prompt that came from the prefix cache; None: not told
    nan: bool = False  # the engine itself gave a log-probability that is none
    edge: str | None = None

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.tokens


@dataclass(frozen=True)
class Finding:
    session: str
    turn: int
    position: int  # of the answer's tokens, from 0
    margin: float | None  # None: no finite number
    cached: int | None
    length: int  # of the prompt
    edge: str | None

    def __str__(self) -> str:
        how = "not a finite number" if self.margin is None else f"{self.margin:.3f} below the best token"
        hit = {None: "whether from the cache is not told", 0: "nothing from the cache"}.get(
            self.cached, f"{self.cached} tokens from the cache"
        )
        edge = f" ({self.edge})" if self.edge else ""
        return (
            f"session {self.session}, turn {self.turn}, position {self.position}: {how}; "
            f"prompt of {self.length} tokens{edge}, {hit}"
        )


@dataclass(frozen=True)
class Scored:
    """An answer and, for each of its tokens, how far it is below the best one. NaN where the judge had a NaN."""

    answer: Answer
    margins: list[float]  # of the kindest reading
    excused: int = 0  # tokens that the first reading alone would have found

    @property
    def suspects(self) -> list[int]:
        """Positions to read again; none where there are too many to be ties."""
        found = [i for i, margin in enumerate(self.margins) if margin > UNSUSPICIOUS]
        return found if len(found) <= max(MOST_SUSPECTS, MOST_SUSPECTS_SHARE * len(self.margins)) else []


def margins(rows: Iterable[dict], tokens: list[int]) -> list[float]:
    """rows: for each token of an answer {token: log-probability}, with the best one and the token taken.

    A NaN anywhere in a row makes its margin NaN, also where the best or the taken one is missing.
    """
    result = []
    for row, token in zip(rows, tokens, strict=True):
        values = list(row.values())
        usable = token in row and not any(math.isnan(value) for value in values)
        result.append(max(values) - row[token] if usable else NAN)
    return result


def longest_only(answers: list[Answer]) -> list[tuple[list[int], list[Answer]]]:
    """(tokens to read, the answers that lie in them): a later turn of a session holds the earlier ones."""
    groups: list[tuple[list[int], list[Answer]]] = []
    for answer in sorted(answers, key=lambda one: -len(one.whole)):
        for whole, inside in groups:
            if whole[: len(answer.whole)] == answer.whole:
                inside.append(answer)
                break
        else:
            groups.append((answer.whole, [answer]))
    return groups


def score(read, answers: list[Answer], read_again=None) -> list[Scored]:
    """`read(tokens)` gives for each position {token: log-probability} as the judging engine has it, None at 0.

    `read_again(tokens, number)` is the same with noise, another one for each number; without it nothing is read again.
    """
    scored = []
    for whole, inside in longest_only([answer for answer in answers if answer.tokens]):
        found = _scored(read(whole), inside)
        if read_again is not None:
            found = _kindest(found, lambda number, whole=whole: read_again(whole, number))
        scored += found
    return scored


def _scored(rows: list[dict | None], answers: list[Answer]) -> list[Scored]:
    cut = lambda answer: rows[len(answer.prompt) : len(answer.whole)]
    return [Scored(answer, margins(cut(answer), answer.tokens)) for answer in answers]


def _kindest(first: list[Scored], again) -> list[Scored]:
    """Suspects with their smallest margin of several readings; no NaN is ever read away."""
    kindest = first
    for number in range(NOISY_READINGS):
        suspects = [one.suspects for one in kindest]
        if not any(suspects):
            break
        noisy = _scored(again(number), [one.answer for one in kindest])
        kindest = [replace(one, margins=[min(old, new) if i in at and new == new else old
                                         for i, (old, new) in enumerate(zip(one.margins, other.margins, strict=True))])
                   for one, other, at in zip(kindest, noisy, suspects, strict=True)]  # fmt: skip
    excused = lambda one, old: len(old.suspects) - len(one.suspects)
    return [replace(one, excused=excused(one, old)) for one, old in zip(kindest, first, strict=True)]


def floor(scored: list[Scored], least: float = LEAST_FLOOR) -> float:
    """The largest margin of the plain arm. Raises ValueError where the plain arm itself is wrong."""
    values = [margin for one in scored for margin in one.margins]
    if not values:
        raise ValueError("the plain arm gave no answers, so that there is no floor; see its log.")
    wrong = [value for value in values if not value <= HIGHEST_FLOOR]
    if wrong or any(one.answer.nan for one in scored):
        raise ValueError(
            f"the plain arm (no cache, no drafts) is wrong itself: {len(wrong)} tokens are more than {HIGHEST_FLOOR} "
            f"below the best one or not a number, the first by {wrong[0] if wrong else NAN:.3f}. Settle that first."
        )
    return max(least, *values)


def findings(scored: list[Scored], bar: float) -> list[Finding]:
    """The first position of each answer beyond the bar, or a NaN. What follows a wrong token follows from it."""
    found = []
    for one in scored:
        position = next((i for i, margin in enumerate(one.margins) if not margin <= bar), None)
        if position is None and one.answer.nan:
            position, margin = 0, NAN
        elif position is not None:
            margin = one.margins[position]
        else:
            continue
        found.append(Finding(
            one.answer.session, one.answer.turn, position, margin if math.isfinite(margin) else None,
            one.answer.cached, len(one.answer.prompt), one.answer.edge,
        ))  # fmt: skip
    return sorted(found, key=lambda one: (one.session, one.turn))


def verdict(scored: list[Scored], bar: float) -> dict:
    """What of an arm goes into the report."""
    found = findings(scored, bar)
    values = [margin for one in scored for margin in one.margins if math.isfinite(margin)]
    return {
        "turns": len(scored),
        "tokens": sum(len(one.margins) for one in scored),
        "bar": bar,
        "largest": max(values, default=None),
        "above_zero": sum(value > 0 for value in values),
        "excused": sum(one.excused for one in scored),
        "hits": sum(bool(one.answer.cached) for one in scored),
        "findings": [asdict(one) | {"text": str(one)} for one in found],
    }


# The judging engine


class Reader:
    """A vLLM engine as `read` and `read_again` of `score`: one request at a time, in one chunk."""

    def __init__(self, llm) -> None:
        import rounding

        self.llm, self.noise = llm, rounding.Noise(llm)
        config = llm.llm_engine.vllm_config
        assert not config.cache_config.enable_prefix_caching and config.speculative_config is None
        assert config.scheduler_config.max_num_batched_tokens >= config.model_config.max_model_len

    def __call__(self, tokens: list[int]) -> list[dict | None]:
        from vllm import SamplingParams

        # One more token has to be asked for, and there must be room for it: the last one needs no reading.
        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], asked, use_tqdm=False)
        return [row and {t: value.logprob for t, value in row.items()} for row in output.prompt_logprobs]

    def again(self, tokens: list[int], number: int) -> list[dict | None]:
        with self.noise.of(number):
            return self(tokens)

    def state(self, tokens: tuple[int, ...], number: int | None = None):
        """What this engine remembers of tokens, with the noise of a number or without any; for state_judge."""
        import probes

        with nullcontext() if number is None else self.noise.of(number):
            return probes.read_alone(self.llm, list(tokens))
