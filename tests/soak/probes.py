"""Probes: what sessions left, asked once more in company, with the states that the engine then has of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from arms import Arm
from judge import Answer
from sessions import Edges
from states import Recorder, State, Unreadable

# Tokens after a prompt, behind which states are looked at too, where there are no drafts. The floor takes more: tokens
# that were decoded are what makes a state differ from that of a cold reading.
PLAIN_DECODED, DECODED = 48, 12
MOST = 3072  # tokens of all probes but one: they have to fit into the cache together
SOON = 8  # a state forgets, so that what a hit brought is seen best after few tokens
STAGGER = 2  # steps between one request and the next, so that some are read while others answer


@dataclass(frozen=True)
class Probe:
    session: str
    when: str  # after which part: prompt or answer
    tokens: list[int]  # that the engine had read
    cached: int  # of them from the prefix cache
    state: State


def choose(answers: list[Answer], edges: Edges, seed: int, count: int, room: int) -> list[tuple[str, list[int]]]:
    """(session, tokens) of the sessions that ended last, cut to lengths around a state block's end and beyond 2,048.

    Longer than a block, so that they can hit, if such are there; one is as long as they come, and all leave `room`.
    """
    newest = {answer.session: answer.whole for answer in answers}
    order = list(dict.fromkeys(answer.session for answer in reversed(answers)))
    hitting = [name for name in order if len(newest[name]) > edges.block + 1] or order
    chosen = hitting[:count]
    if chosen and (longest := max(hitting, key=lambda name: len(newest[name]))) not in chosen:
        chosen[-1] = longest
    random_ = random.Random(seed)
    return [
        (name, newest[name][: _length(random_, i, len(newest[name]), edges, name == longest, room)])
        for i, name in enumerate(chosen)
    ]


def _length(choose: random.Random, number: int, whole: int, edges: Edges, is_longest: bool, room: int) -> int:
    most = min(whole, edges.longest - room)
    if is_longest:
        return most
    blocks = (most - SOON) // edges.block
    if number % 4 != 3 and blocks > 0:
        after = choose.randint(1, SOON) if number % 2 == 0 else choose.choice((-1, 0, 1))
        return choose.randint(1, min(blocks, max(1, MOST // edges.block))) * edges.block + after
    if most > edges.sparse + 1:
        return choose.randint(edges.sparse + 1, min(most, MOST))
    return min(most, MOST)


def ask(llm, asked: list[tuple[str, list[int]]], decoded: int, has_drafts: bool = False) -> list[Probe]:
    """Their states where each prompt has been read and, without drafts, when `decoded` tokens more have.

    Raises Unreadable where the engine never stood at such a length, or does not answer.
    """
    from vllm import SamplingParams

    engine, steps, ended = llm.llm_engine, 0, {}
    waiting = {f"probe{i}": one for i, one in enumerate(asked)}
    lengths = {name: [len(tokens)] + [len(tokens) + decoded] * (not has_drafts and decoded > 0)
               for name, (_, tokens) in waiting.items()}  # fmt: skip
    sampling = SamplingParams(max_tokens=decoded + 1, temperature=0, ignore_eos=True, detokenize=False)
    with Recorder(llm, {(name, length) for name in lengths for length in lengths[name]}) as recorder:
        starts = list(lengths)
        while starts or engine.has_unfinished_requests():
            if starts and steps % STAGGER == 0:
                name = starts.pop(0)
                engine.add_request(name, {"prompt_token_ids": waiting[name][1]}, sampling)
            ended |= {output.request_id.split("-")[0]: output for output in engine.step() if output.finished}
            steps += 1
            if steps > 100_000:
                raise Unreadable(f"{len(asked) - len(ended)} of {len(asked)} probes had no answer in {steps} steps.")
    return [
        _probe(waiting[name], ended[name], length, recorder.found.get((name, length)))
        for name in lengths
        for length in lengths[name]
    ]


def _probe(asked: tuple[str, list[int]], output, length: int, state: State | None) -> Probe:
    session, prompt = asked
    if state is None:
        raise Unreadable(f"session {session}: no step of the engine ended at {length} tokens.")
    tokens = (prompt + list(output.outputs[0].token_ids))[:length]
    when = "prompt" if length == len(prompt) else "answer"
    return Probe(session, when, tokens, output.num_cached_tokens or 0, state)


def of_soak(llm, answers: list[Answer], edges: Edges, seed: int, count: int, arm: Arm) -> list[Probe]:
    """With a cache twice: what the sessions left in it, then what the first round did, begun with its last ones."""
    decoded = PLAIN_DECODED if arm.is_plain else DECODED
    asked = choose(answers, edges, seed, count, decoded + 1)
    rounds = [asked, asked[::-1]] if arm.cache == "cache" else [asked]
    return [probe for one in rounds for probe in ask(llm, one, decoded, arm.drafts != "nodrafts")]


def read_alone(llm, tokens: list[int]) -> State:
    """What an engine has of tokens that it reads alone."""
    (probe,) = ask(llm, [("", tokens)], 0)
    return probe.state
