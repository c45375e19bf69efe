"""One engine of bench/guards.py, in a process of its own: starts vLLM, then works when it is told to, and times that.

A line of JSON on stdin is a turn, a line on stdout what it took; logs go to stderr. It ends where stdin ends.

All engines of a comparison run on the same few CPUs, which is no loss, since one works at a time: on CPUs of their own
equal engines would differ by how far those are from the GPU, and by more than guards cost.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PARTS = 4  # turns of one measure in a round; between them other engines have theirs
SHORT = 32  # tokens of a prompt whose answer is timed
PROMPTS = 3  # long ones of a turn
WARM_STEPS = 4  # untimed, when a turn begins: another engine had the GPU and the processor's caches
IDLE_STEPS = 5_000
CPUS = 4  # of each engine: one thread works, others wait or log


@dataclass(frozen=True)
class Measure:
    bar: float  # of the issue: the share of throughput that all guards together may cost
    decoding: int  # requests that decode
    reads: bool  # whether prompts are timed, beside what decodes, or the decoding itself


MEASURES = {
    "decode 1": Measure(0.01, 1, False),
    "decode 8": Measure(0.01, 8, False),
    "prefill": Measure(0.02, 0, True),
    "prefill beside 7": Measure(0.02, 7, True),  # what they leave of a step is cut to whole pools
}


@dataclass(frozen=True)
class Sizes:
    prompt: int = 8000  # tokens of a prompt that is timed
    new: int = 300  # timed tokens of each request that decodes
    step: int = 2048  # tokens of a step

    @property
    def longest(self) -> int:
        """Tokens of a context: room for what is decoded untimed, and beside prompts, with 7 drafts a step."""
        return max(self.prompt, self.new + 512) + 64


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
    """Takes turns with one engine. A turn is part 0, 1, ... of a measure in a round, and parts come in order.

    `engine` is vLLM's LLMEngine, `clock` gives seconds.
    """

    def __init__(
        self, engine, texts: Texts, sizes: Sizes, sampling=sampling, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine, self.texts, self.sizes, self.sampling, self.clock = engine, texts, sizes, sampling, clock
        self.decoding: list[str] = []
        self.number = self.steps = 0

    def play(self, measure: str, round: int, part: int) -> dict:
        """{"tokens", "seconds", "steps"} of what was timed."""
        what, seed = MEASURES[measure], f"{measure} {round} {part}"
        if part == 0:
            self._begin_answers(what.decoding, seed)
        for _ in range(WARM_STEPS if what.decoding else 0):
            self._step()
        timed = self._read(seed) if what.reads else self._decode(what.decoding * self.sizes.new // PARTS)
        if part == PARTS - 1:
            self.engine.abort_request(self.decoding)
            self.decoding = []
        return timed

    def warm(self) -> None:
        """Every measure once: kernels are compiled at their first use."""
        for measure in MEASURES:
            print(f"the engine is up and tries {measure!r}", file=sys.stderr, flush=True)
            for part in range(PARTS):
                self.play(measure, -1, part)

    def _begin_answers(self, seats: int, seed: str) -> None:
        """Prompts are read before anything is timed."""
        room = self.sizes.longest - SHORT - 8
        self.decoding = [self._ask(self.texts.short(f"{seed} {seat}"), room) for seat in range(seats)]
        begun: set[str] = set()
        while len(begun) < seats:
            begun |= {output.request_id for output in self._step() if output.outputs[0].token_ids}

    def _decode(self, wanted: int) -> dict:
        tokens, steps, begin = 0, self.steps, self.clock()
        while tokens < wanted:
            tokens += sum(len(output.outputs[0].token_ids) for output in self._step())
        return {"tokens": tokens, "seconds": self.clock() - begin, "steps": self.steps - steps}

    def _read(self, seed: str) -> dict:
        """One prompt of a few steps untimed, then the timed ones, all in the queue at once."""
        self._read_all([self.texts.long(f"{seed} first", min(self.sizes.prompt, self.sizes.step))])
        return self._read_all([self.texts.long(f"{seed} {i}", self.sizes.prompt) for i in range(PROMPTS)])

    def _read_all(self, prompts: list[list[int]]) -> dict:
        for prompt in prompts:
            self._ask(prompt, 1)
        left, steps, begin = len(prompts), self.steps, self.clock()
        while left:
            left -= sum(output.finished for output in self._step())
        return {"tokens": sum(map(len, prompts)), "seconds": self.clock() - begin, "steps": self.steps - steps}

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


def common_cpus(allowed: set[int], system: Path = Path("/sys/devices/system")) -> set[int]:
    """Some of the fastest CPUs of one NUMA node: the same for each process that may use the same ones."""

    def of(cpu: int, file: str) -> int:
        path = system / "cpu" / f"cpu{cpu}" / file
        return int(path.read_text()) if path.is_file() else 0

    # Not each kind of machine tells both; where none is told, all CPUs are alike.
    speed = {cpu: (of(cpu, "cpu_capacity"), of(cpu, "cpufreq/cpuinfo_max_freq")) for cpu in allowed}
    order = sorted(allowed, key=lambda cpu: (*(-one for one in speed[cpu]), cpu))
    nodes = [node.name for node in (system / "cpu" / f"cpu{order[0]}").glob("node[0-9]*")]
    near = [cpu for cpu in order if all((system / "cpu" / f"cpu{cpu}" / node).exists() for node in nodes)]
    return set(near[:CPUS])


def pin() -> list[int]:
    """Before anything is imported: threads have the CPUs of the one that starts them."""
    os.sched_setaffinity(0, common_cpus(os.sched_getaffinity(0)))
    return sorted(os.sched_getaffinity(0))


def serve(player: Player, about: dict, turns: Iterable[str], reply: Callable[[dict], None]) -> None:
    """`about` says once that the engine is up; then one reply for each turn."""
    player.warm()
    reply(about)
    for turn in turns:
        reply(player.play(**json.loads(turn)))


def replies() -> Callable[[dict], None]:
    """Whatever else writes to stdout goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda said: print(json.dumps(said), file=stream)


def main() -> None:
    cpus = pin()
    reply, order = replies(), json.loads(sys.argv[1])
    sys.path += [str(ROOT / folder) for folder in ("tests/soak", "tests/gpu/engine", ".")]
    import arm
    import arms
    import engine

    arm.settle_environment()
    one, sizes, models = arms.named(order["arm"]), Sizes(**order["sizes"]), Path(order["models"])
    size = {"longest": sizes.longest, "chunk": sizes.step, "seats": max(one.decoding for one in MEASURES.values())}
    # Also on the CPU, where the command can be tried; nothing is written to the log while it is timed.
    options = {"scheduler_cls": arm.DEFAULTS["scheduler_cls"], "disable_log_stats": True}
    start = size | {"models": order["models"], "plain": False, "pool_mib": order["pool_mib"], "tp": 1,
                    "options": options}  # fmt: skip
    llm = engine.start_arm(models / arms.model_of(one), arms.Platform(**order["platform"]), one, start)
    from vllm_exl3.switches import switches

    about = {"guards_off": switches().guards_off, "scheduler": type(scheduler_of(llm)).__name__, "cpus": cpus}
    serve(Player(llm.llm_engine, Texts(models / "local"), sizes), about, sys.stdin, reply)
    os._exit(0)  # nothing that vLLM does at exit is timed


def scheduler_of(llm):
    """vLLM's, of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


if __name__ == "__main__":
    main()
