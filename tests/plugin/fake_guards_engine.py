"""Stands in for bench/guards_engine.py in its tests: an engine without a model, whose steps take given times.

Its first argument is JSON: "step_ms", "guard_ms" (more for a step with guards), "cold_ms" (more
for the first prompt after other work), "sleeps" (else its clock only counts
steps), "groups" (of each turn), "fail" ("start", "turn", "never up", "stuck", "hang in round 6").
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("bench", "overlay")]

import guards_engine
from guard_switch import Place, Switch, by_guards
from guards_engine import Player, Sizes


class FakeEngine:
    """vLLM's LLMEngine as far as Player uses it. Prompts share a step of `chunk` tokens in order; each request that
    decodes gets one token a step. Starts with its guard, which takes `guard_s` of each step."""

    is_guarded = True

    def __init__(
        self, chunk: int = 2048, step_s: float = 0.0, sleeps: bool = False, cached: int = 0, guard_s: float = 0.0,
        cold_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.chunk, self.step_s, self.sleeps, self.cached, self.guard_s = chunk, step_s, sleeps, cached, guard_s
        self.cold_s, self.has_read = cold_s, False
        self.requests: dict[str, list[int]] = {}  # name -> tokens of the prompt left, new ones left
        self.now, self.prompts = 0.0, []

    def clock(self) -> float:
        return time.perf_counter() if self.sleeps else self.now

    def add_request(self, name, prompt, tokens) -> None:
        self.prompts.append(prompt["prompt_token_ids"])
        self.requests[name] = [len(self.prompts[-1]), tokens]

    def abort_request(self, names) -> None:
        for name in names:
            del self.requests[name]

    def work(self, seconds: float) -> None:
        self.now += seconds
        if self.sleeps:
            time.sleep(seconds)

    def guard(self) -> None:
        self.work(self.guard_s)

    def step(self) -> list:
        self.work(self.step_s)
        if self.is_guarded:
            self.guard()
        reads = any(prompt > 0 for prompt, _ in self.requests.values())
        if reads and not self.has_read:
            self.work(self.cold_s)
        self.has_read = reads
        budget, outputs = self.chunk, []
        for name, left in list(self.requests.items()):
            read = min(budget, left[0])
            budget -= read
            left[0] -= read
            if not left[0]:
                left[1] -= 1
                outputs.append(self.output(name, finished=not left[1]))
        return outputs

    def output(self, name: str, finished: bool):
        if finished:
            del self.requests[name]
        said = SimpleNamespace(token_ids=[7])
        return SimpleNamespace(
            request_id=f"{name}-0a1b", outputs=[said], finished=finished, num_cached_tokens=self.cached
        )


class FakeTexts:
    def short(self, seed: str) -> list[int]:
        return self.long(seed, guards_engine.SHORT)

    def long(self, seed: str, count: int) -> list[int]:
        return [hash(seed)] * count


GUARD = {"guard": (FakeEngine, "guard")}


def switch(engine: FakeEngine, off: bool = False) -> Switch:
    """`off` is what the switch's off does to the engine's guard; True is the bug that it does nothing."""
    return Switch([Place(("fake",), engine, "is_guarded", by_guards(True, off))], GUARD)


def main() -> None:
    reply, setting, order = guards_engine.replies(), json.loads(sys.argv[1]), json.loads(sys.argv[2])
    fail = setting.get("fail")
    if fail == "start":
        sys.exit("vLLM: no GPU today")
    if fail == "never up":
        time.sleep(60)
    if "groups" in setting:
        few = {name: replace(one, groups=setting["groups"]) for name, one in guards_engine.MEASURES.items()}
        guards_engine.MEASURES = few
    times = {"step_ms": 1.0, "guard_ms": 0.0, "cold_ms": 0.0}
    step_s, guard_s, cold_s = (setting.get(name, default) / 1e3 for name, default in times.items())
    engine = FakeEngine(step_s=step_s, guard_s=guard_s, cold_s=cold_s, sleeps=setting.get("sleeps", False))
    player = Player(engine, switch(engine, fail == "stuck"), FakeTexts(), Sizes(**order["sizes"]),
                    sampling=lambda tokens: tokens, clock=engine.clock)  # fmt: skip
    play = player.play

    def noted(measure: str, round: int) -> list[dict]:
        if fail == "turn":
            raise RuntimeError("out of memory")
        if fail == "hang in round 6" and round == 5:
            time.sleep(60)
        return play(measure, round)

    player.play = noted
    print("what vLLM prints to stdout is no reply")
    guards_engine.serve(player, {"schedulers": {}}, sys.stdin, reply)


if __name__ == "__main__":
    main()
