"""The canary of the prefix cache: one prompt, asked cold and then from the cache, has to be answered alike."""

from __future__ import annotations

import http.client
import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher import canary, console, counters
from launcher.canary import Answer, Question
from launcher.errors import Exit, LauncherError
from launcher.settings import MODEL_ID

# With a draft model the last whole block that was found is computed again, so that one block alone never hits.
BLOCKS = 2
PAST_BLOCKS = 64  # tokens
ALTERNATIVES = 5
# In nats. Other sizes of a step round differently, which moves a log-probability by some hundredths (0.13 at most over
# chunk sizes of the CPU engine; not measured on a GB10) and swaps tokens that are nearly as likely; a wrong state moves
# it by whole numbers.
MARGIN = 1.0


@dataclass(frozen=True)
class Token:
    text: str
    logprob: float
    others: Mapping[str, float]  # the likeliest tokens at this position, with their log-probabilities


@dataclass(frozen=True)
class Said:
    answer: Answer
    tokens: tuple[Token, ...]
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not tell


@dataclass(frozen=True)
class Door:
    """Where and within which limits is asked."""

    host: str
    port: int
    api_key: str
    max_tokens: int
    timeout_s: float  # of all plain questions, and of each answer of the other kind
    consequence: str  # of a wrong answer, see canary.py


def ask_all(questions: Sequence[Question], door: Door) -> list[tuple[Question, Answer]]:
    """Those of the prefix cache last. Raises LauncherError at the first wrong answer."""
    plain = [question for question in questions if question.kind != canary.CACHED]
    answered = canary.check_answers(
        door.port, plain, door.api_key, door.host, door.max_tokens, door.timeout_s, door.consequence
    )
    for question in questions:
        if question.kind == canary.CACHED:
            answered += check(question, door)
    return answered


def check(question: Question, door: Door) -> list[tuple[Question, Answer]]:
    """What was asked and answered; nothing, with a note, where no answer came from the cache. Raises LauncherError."""
    told = counters.fetch(door.host, door.port, door.api_key) or counters.Counters()
    if not counters.has_prefix_cache(told):
        console.say("Note: the prefix cache is off, so that no cached prefix was compared.")
        return []
    question = replace(question, tokens=BLOCKS * counters.block_tokens(told) + PAST_BLOCKS)
    try:
        prompt = canary.prompt_of(question, door.port, door.api_key, door.host, door.max_tokens)
        if prompt is None:
            return []
        salt = secrets.token_hex(16)  # of nobody else: the first time finds nothing, the second time only this
        cold, warm = (ask(door, prompt, salt) for _ in range(2))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise LauncherError(
            f"canary: no answer to {question.label!r} ({type(error).__name__}: {error}); look at the log.", Exit.SERVER
        ) from error
    canary.refuse_wrong(question, cold.answer, door.consequence)
    if not warm.cached_tokens:
        canary.refuse_wrong(question, warm.answer, door.consequence)
        console.say(
            f"Note: asked a second time, nothing of the {warm.prompt_tokens:,} tokens came from the prefix cache, so "
            f"that no cached prefix was compared."
        )
        return []
    refuse_damaged(question, cold, warm, door.consequence)
    told = (
        f"{warm.answer.text.strip()}  ({warm.cached_tokens:,} of {warm.prompt_tokens:,} tokens from the prefix cache; "
        f"as cold, within {difference(cold.tokens, warm.tokens):.2f} nats)"
    )
    return [(question, Answer(told, finished=True))]


def ask(door: Door, prompt: str, salt: str) -> Said:
    body = json.dumps({
        "model": MODEL_ID, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
        "max_tokens": door.max_tokens, "logprobs": True, "top_logprobs": ALTERNATIVES, "cache_salt": salt,
    })  # fmt: skip
    headers = canary.headers_with(door.api_key)
    status, said = canary.request(
        door.port, "POST", "/v1/chat/completions", body, headers, door.timeout_s, door.host
    )
    if status != 200:
        raise ValueError(f"status {status}: {said[:300].decode(errors='replace')}")
    return read(said)


def read(body: bytes) -> Said:
    reply = json.loads(body)
    usage, positions = reply["usage"], reply["choices"][0]["logprobs"]["content"]
    tokens = tuple(
        Token(one["token"], one["logprob"], {other["token"]: other["logprob"] for other in one["top_logprobs"]})
        for one in positions
    )
    details = usage.get("prompt_tokens_details") or {}
    return Said(canary.read_answer(body), tokens, usage["prompt_tokens"], details.get("cached_tokens"))


# Judging


def refuse_damaged(question: Question, cold: Said, warm: Said, consequence: str) -> None:
    wrong, apart = canary.fault(question, warm.answer), difference(cold.tokens, warm.tokens)
    if not wrong and apart > MARGIN:
        wrong = f"log-probabilities are {apart:.2f} apart, where rounding explains {MARGIN:g}"
    if wrong:
        raise LauncherError(
            f"canary: to {question.label!r} the model answered {cold.answer.text[:200]!r} cold and "
            f"{warm.answer.text[:200]!r} with {warm.cached_tokens:,} tokens from the prefix cache, {wrong}; what "
            f"is cached is damaged, {consequence}. PREFIX_CACHE=0 does without the cache, `cache reset` empties that "
            f"of a running server.",
            Exit.WRONG_ANSWER,
        )


def difference(cold: Sequence[Token], warm: Sequence[Token]) -> float:
    """Largest distance of log-probabilities in nats, up to where the texts part; infinite where one is no number."""
    found = list(distances(cold, warm))
    return math.inf if any(map(math.isnan, found)) else max(found, default=0.0)


def distances(cold: Sequence[Token], warm: Sequence[Token]) -> Iterator[float]:
    for one, other in zip(cold, warm, strict=False):
        if one.text == other.text:
            yield abs(one.logprob - other.logprob)
        else:
            yield one.logprob - logprob_of(other.text, one)
            yield other.logprob - logprob_of(one.text, other)
            return  # from here on they continue different texts


def logprob_of(text: str, at: Token) -> float:
    """Of another token at that position; of one that is not among the likeliest, at most this."""
    return at.others.get(text, min(at.others.values(), default=-math.inf))
