"""The engine of bench/guards.py, in a process of its own: starts vLLM, then works as it is told to, and times that.

A line of JSON on stdin is a turn, a line on stdout what it took; logs go to stderr. It ends where stdin ends.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from guard_switch import WAYS, Switch, capture_graphs, of_engine

ROOT = Path(__file__).resolve().parents[1]

SHORT = 32  # tokens of a prompt whose answer is timed
UNTIMED = {True: 1, False: 4}  # prompts, else steps, of each way when a turn begins: another measure came before
MOST_ROWS = 8  # tokens that a request may get of a step: 7 drafts and one more
TRIED = 40  # tokens of the answer that all ways should give alike
IDLE_STEPS = 5_000


@dataclass(frozen=True)
class Measure:
    bar: float  # the share of throughput that all guards together may cost
    decoding: int  # requests that decode
    reads: bool  # whether prompts are timed, beside what decodes, or the decoding itself
    groups: int  # of a turn: one prompt, or one step, in each way


MEASURES = {
    "decode 1": Measure(0.01, 1, False, 60),
    "decode 8": Measure(0.01, 8, False, 60),
    "prefill": Measure(0.02, 0, True, 6),
    "prefill beside 7": Measure(0.02, 7, True, 6),  # what they leave of a step is cut to whole pools
}
ORDERS = list(itertools.permutations(WAYS))


@dataclass(frozen=True)
class Sizes:
    prompt: int = 8000  # tokens of a prompt that is timed
    step: int = 2048  # tokens of a step

    @property
    def longest(self) -> int:
        """Tokens of a context: room for what one request decodes in a turn."""
        # A step may read half of what it could: vLLM ends chunks on blocks of the state.
        steps = {True: 2 + 2 * self.prompt // self.step, False: 1}
        most = max(len(WAYS) * (UNTIMED[one.reads] + one.groups) * steps[one.reads] for one in MEASURES.values())
        return max(self.prompt, MOST_ROWS * most) + SHORT + 64


def orders() -> Iterator[tuple[str, ...]]:
    """All orders equally often, so that each way has every place and comes after each other one; in no order, so that
    none of them always begins a turn."""
    chance = random.Random(0)
    while True:
        yield from chance.sample(ORDERS, len(ORDERS))


class Texts:
    """Prompts of a seed: short ones that ask the model something, long ones of random tokens, which nothing caches."""

    def __init__(self, model: Path) -> None:
        from words import Words

        self.words = Words(model)
        # The tokens of text come before those that end a text.
        self.ordinary = min(json.loads((model / "config.json").read_text())["eos_token_id"])

    def short(self, seed: str) -> list[int]:
        return self.words.asked("text", seed, SHORT)

    def long(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(range(self.ordinary), k=count)


def sampling(tokens: int):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )


class Player:
    """Takes turns with one engine. In a turn the ways of a measure alternate as fast as they can, at each prompt or
    step, since what slows a machine down lasts longer; what decodes is the same for all ways.

    `engine` is vLLM's LLMEngine, `clock` gives seconds.
    """

    def __init__(
        self, engine, switch: Switch, texts: Texts, sizes: Sizes, sampling=sampling,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.engine, self.switch, self.texts, self.sizes = engine, switch, texts, sizes
        self.sampling, self.clock = sampling, clock
        self.orders = orders()
        self.decoding: list[str] = []
        self.number = self.steps = 0

    def play(self, measure: str, round: int) -> list[dict[str, dict]]:
        """For each group, way -> {"tokens", "seconds", "steps"}."""
        what, seed = MEASURES[measure], f"{measure} {round}"
        self._begin_answers(what.decoding, seed)
        for way in WAYS:
            for i in range(UNTIMED[what.reads]):
                self._time(what, f"{seed} untimed {i} {way}", way)
        return [{way: self._time(what, f"{seed} {group} {way}", way) for way in next(self.orders)}
                for group in range(what.groups)]  # fmt: skip

    def _time(self, what: Measure, seed: str, way: str) -> dict:
        self.switch.to(way)
        if what.reads:  # a way that read what another one did would find it in the prefix cache
            prompt = self.texts.long(seed, self.sizes.prompt)
            name, tokens = self._ask(prompt, 1), len(prompt)
        steps, begin = self.steps, self.clock()
        if what.reads:
            self._read(name)
        else:
            tokens = sum(len(output.outputs[0].token_ids) for output in self._step())
        return {"tokens": tokens, "seconds": self.clock() - begin, "steps": self.steps - steps}

    def warm(self) -> dict[str, bool]:
        """Every measure for each way: kernels are compiled at their first use. Raises SwitchError where guards work
        without being switched on, or not though they are. Says of each way whether it answers as the first one."""
        said = {}
        for way in WAYS:
            print(f"the engine is up and tries the way {way!r}", file=sys.stderr, flush=True)
            with self.switch.proof(way, "every measure once"):
                said[way] = self._answer("the same for all ways")
                for name, what in MEASURES.items():
                    self._begin_answers(what.decoding, name)
                    self._time(what, f"{name} {way}", way)
            self._end_answers()
        return {way: tokens == said["on"] for way, tokens in said.items()}

    def _answer(self, seed: str) -> list[int]:
        self._ask(self.texts.short(seed), TRIED)
        tokens: list[int] = []
        while len(tokens) < TRIED:
            tokens += [token for output in self._step() for token in output.outputs[0].token_ids]
        return tokens

    def _begin_answers(self, seats: int, seed: str) -> None:
        """In the place of those that decoded until now. Prompts are read before anything is timed."""
        self._end_answers()
        room = self.sizes.longest - SHORT - 8
        self.decoding = [self._ask(self.texts.short(f"{seed} {seat}"), room) for seat in range(seats)]
        begun: set[str] = set()
        while len(begun) < seats:
            begun |= {output.request_id for output in self._step() if output.outputs[0].token_ids}

    def _end_answers(self) -> None:
        self.engine.abort_request(self.decoding)
        self.decoding = []

    def _read(self, name: str) -> None:
        while not any(output.request_id.split("-")[0] == name for output in self._step()):
            pass

    def _ask(self, prompt: list[int], tokens: int) -> str:
        self.number += 1
        self.engine.add_request(str(self.number), {"prompt_token_ids": prompt}, self.sampling(tokens))
        return str(self.number)

    def _step(self) -> list:
        """What the next step that says anything says; raises RuntimeError where that spoils what is timed."""
        for _ in range(IDLE_STEPS):
            self.steps += 1
            if outputs := self.engine.step():
                break
        else:
            raise RuntimeError(f"no request moved for {IDLE_STEPS} steps; vLLM's lines above may say why.")
        for output in outputs:
            if output.num_cached_tokens:
                raise RuntimeError(f"request {output.request_id}: {output.num_cached_tokens} tokens of its prompt came "
                                   f"from the prefix cache, but prompts must be new to be timed.")  # fmt: skip
            if output.finished and output.request_id.split("-")[0] in self.decoding:
                raise RuntimeError(f"request {output.request_id} ended while others were timed beside it; give it a "
                                   f"longer context (Sizes.longest).")  # fmt: skip
        return outputs


def serve(player: Player, about: dict, turns: Iterable[str], reply: Callable[[dict], None]) -> None:
    """`about` says once that the engine is up, with what proves that it switches; then one reply for each turn."""
    answers = player.warm()
    switch = player.switch
    reply(about | {"switched": switch.guards, "calls": switch.called, "graphs": switch.counts(),
                   "answers_as_on": answers})  # fmt: skip
    for turn in turns:
        reply(player.play(**json.loads(turn)))


def replies() -> Callable[[dict], None]:
    """Whatever else writes to stdout goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda said: print(json.dumps(said), file=stream)


def start(order: dict) -> tuple[Player, dict]:
    """(the player of an engine that vLLM started, what it says of itself)."""
    sys.path += [str(ROOT / folder) for folder in ("tests/soak", "tests/gpu/engine", ".")]
    import arm
    import arms
    import engine

    arm.settle_environment()
    one, sizes, models = arms.named(order["arm"]), Sizes(**order["sizes"]), Path(order["models"])
    platform = arms.Platform(**order["platform"])
    size = {"longest": sizes.longest, "chunk": sizes.step, "seats": max(one.decoding for one in MEASURES.values())}
    # Also on the CPU, where the command can be tried; nothing is written to the log while it is timed.
    options = {"scheduler_cls": arm.DEFAULTS["scheduler_cls"], "disable_log_stats": True}
    begin = size | {"models": order["models"], "plain": False, "pool_mib": order["pool_mib"], "tp": 1,
                    "options": options}  # fmt: skip
    llm = engine.start_arm(models / arms.model_of(one), platform, one, begin)
    switch = of_engine(llm, platform.name == "cuda", order["planted_us"])
    if one.mode == "graphs" and platform.name == "cuda":
        capture_graphs(llm, switch)
    about = {"schedulers": {way: made.__name__ for way, made in switch.places[0].values.items()}}
    return Player(llm.llm_engine, switch, Texts(models / "local"), sizes), about


def main() -> None:
    reply = replies()
    try:
        player, about = start(json.loads(sys.argv[1]))
        serve(player, about, sys.stdin, reply)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # what vLLM says at exit would hide it
    os._exit(0)  # nothing that vLLM does at exit is timed


if __name__ == "__main__":
    main()
