"""Runs a plan in vLLM's own engine, step by step, so that who shares a step with whom is the plan's and repeats."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from judge import Answer
from sessions import Plan, Session, Turn
from words import Words, first_prompt


@dataclass
class Talk:
    """One session while it runs."""

    session: Session
    turn: int = 0
    prompt: list[int] = field(default_factory=list)
    taken_back: bool = False  # the turn was aborted already, and is asked for good now
    request: str | None = None

    @property
    def now(self) -> Turn:
        return self.session.turns[self.turn]


@dataclass
class Counts:
    steps: int = 0
    aborts: int = 0
    hits: int = 0
    read: int = 0  # tokens of prompts
    cached: int = 0  # of those, from the prefix cache
    most_at_once: int = 0


class Soak:
    """One run of a plan. What happens at a step depends on the plan and on the steps before, on no clock."""

    def __init__(self, llm, words: Words, plan: Plan, say: Callable[[str], None] = lambda line: None) -> None:
        self.engine, self.words, self.plan, self.say = llm.llm_engine, words, plan, say
        self.counts, self.answers = Counts(), []
        self.number, self.due = itertools.count(), []  # (step, order, action)
        self.running: dict[str, Talk] = {}

    def run(self) -> list[Answer]:
        """Raises RuntimeError, naming who waits or was cut short, if the engine does nothing for many steps or less
        than it was asked for."""
        for session in self.plan.sessions:
            self._later(session.turns[0].wait, self._ask, Talk(session, prompt=first_prompt(self.words, session)))
        idle = 0
        while self.due or self.running:
            self._act()
            if self.running:
                moved = [self._take(output) for output in self.engine.step()]
                idle = 0 if moved else idle + 1
            self.counts.steps += 1
            if idle > 5_000:
                raise RuntimeError(f"step {self.counts.steps}: no request moved for {idle} steps: {self._waiting()}")
        return self.answers

    def _act(self) -> None:
        if not self.running and self.due:  # nothing to wait for
            self.counts.steps = max(self.counts.steps, self.due[0][0])
        while self.due and self.due[0][0] <= self.counts.steps:
            _, _, action, talk = heapq.heappop(self.due)
            action(talk)

    def _later(self, steps: int, action, talk: Talk) -> None:
        heapq.heappush(self.due, (self.counts.steps + steps, next(self.number), action, talk))

    def _ask(self, talk: Talk) -> None:
        talk.request = str(next(self.number))
        self.running[talk.request] = talk
        self.counts.most_at_once = max(self.counts.most_at_once, len(self.running))
        prompt = {"prompt_token_ids": talk.prompt}
        self.engine.add_request(talk.request, prompt, sampling(talk.now, talk.session.logprobs))
        if talk.now.abort is not None and not talk.taken_back:
            self._later(talk.now.abort, self._take_back, talk)

    def _take_back(self, talk: Talk) -> None:
        if talk.taken_back or talk.request not in self.running:
            return  # it was answered before
        self.engine.abort_request([talk.request])
        del self.running[talk.request]
        talk.taken_back = True
        self.counts.aborts += 1
        self._later(talk.now.retry, self._ask, talk)

    def _take(self, output) -> None:
        name = output.request_id.split("-")[0]
        if not output.finished or name not in self.running:
            return
        talk = self.running.pop(name)
        answer = unpack(talk.session.name, talk.turn, talk.prompt, output, talk.now.edge)
        if len(answer.tokens) != talk.now.answer:  # a judge would say nothing of tokens that are not there
            raise RuntimeError(f"{talk.session.name} turn {talk.turn}: {len(answer.tokens)} tokens came, "
                               f"{talk.now.answer} were asked for.")  # fmt: skip
        self.answers.append(answer)
        self.counts.read += len(talk.prompt)
        self.counts.cached += answer.cached or 0
        self.counts.hits += bool(answer.cached)
        if len(self.answers) % 25 == 0:
            self.say(f"{len(self.answers)} of {self.plan.turns} turns, {self.counts.steps} steps")
        self._next(talk, answer)

    def _next(self, talk: Talk, answer: Answer) -> None:
        talk.turn, talk.taken_back = talk.turn + 1, False
        if talk.turn == len(talk.session.turns):
            return
        turn = talk.now
        talk.prompt = answer.whole + self.words.asked(turn.kind, turn.seed, turn.asked)
        self._later(turn.wait, self._ask, talk)

    def _waiting(self) -> str:
        return ", ".join(f"{talk.session.name} turn {talk.turn}" for talk in self.running.values())


def sampling(turn: Turn, logprobs: bool):
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=turn.answer, temperature=0, ignore_eos=True, detokenize=False, logprobs=0 if logprobs else None
    )


def unpack(session: str, turn: int, prompt: list[int], output, edge: str | None) -> Answer:
    said = output.outputs[0]
    rows = said.logprobs or []
    nan = any(math.isnan(value.logprob) for row in rows for value in row.values())
    return Answer(session, turn, prompt, list(said.token_ids), output.num_cached_tokens, nan, edge)
