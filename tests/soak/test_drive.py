"""One plan in an engine that is pretended: what it says less than asked, and findings that outlive the time."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import arms
import drive
import engine
import pytest
from drive import Counts, Soak
from sessions import Edges, Plan, Session, Turn, to_json

PLAN = Plan(0, Edges(16, 64, 256), (Session("s0", 0, 0, (Turn(4, 3, 1),), False),))


class FakeEngine:
    """Answers each request in one step, with `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.asked = tokens, []

    def add_request(self, name, prompt, sampling) -> None:
        self.asked.append(name)

    def step(self) -> list:
        said = SimpleNamespace(token_ids=[7] * self.tokens, logprobs=None)
        return [SimpleNamespace(request_id=f"{self.asked.pop()}-0", finished=True, outputs=[said], num_cached_tokens=0)]


def run_plan(tokens: int, monkeypatch) -> list:
    monkeypatch.setattr(drive, "sampling", lambda turn, logprobs: None)
    monkeypatch.setattr(drive, "first_prompt", lambda words, session: [1, 2])
    return Soak(SimpleNamespace(llm_engine=FakeEngine(tokens)), None, PLAN).run()


def test_an_answer_that_is_cut_short_is_no_silence(monkeypatch):
    """Judged would be what is there: of no token at all, nothing."""
    assert [len(answer.tokens) for answer in run_plan(3, monkeypatch)] == [3]
    for tokens in (0, 2):
        with pytest.raises(RuntimeError, match=f"s0 turn 0: {tokens} tokens came, 3 were asked for"):
            run_plan(tokens, monkeypatch)


def test_findings_are_kept_where_time_is_over_while_a_smaller_plan_is_looked_for(tmp_path, monkeypatch):
    said = {"turns": 1, "largest": 2.0, "excused": 0, "hits": 0, "findings": [{"text": "wrong"}]}
    llm = SimpleNamespace(get_metrics=list, reset_prefix_cache=lambda: None)
    monkeypatch.setattr(engine, "start_arm", lambda *_: llm)
    monkeypatch.setattr(engine, "Words", lambda model: None)
    monkeypatch.setattr(engine, "Soak", lambda *_: SimpleNamespace(run=list, counts=Counts()))
    monkeypatch.setattr(engine.exchange, "ask", lambda *_: dict(said))
    monkeypatch.setattr(engine.sessions, "shrink", lambda *_: (_ for _ in ()).throw(TimeoutError))
    (tmp_path / "plan").write_text(to_json(PLAN))
    order = {"arm": arms.plain("auto").name, "name": "a", "work": str(tmp_path), "models": str(tmp_path), "bug": None,
             "plain": False, "plan": str(tmp_path / "plan"), "probes": 0, "reruns": 3, "judge": 0,
             "platform": asdict(arms.Platform("cpu"))}  # fmt: skip
    with pytest.raises(TimeoutError):
        engine.answer(order)
    assert json.loads((tmp_path / "a.report.json").read_text())["findings"] == said["findings"]
