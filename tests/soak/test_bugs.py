"""What the planted bugs do, where that needs no GPU, and that each names what is there."""

from types import SimpleNamespace

import bugs
import pytest
import torch
from sessions import Edges, edge_lengths
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_exl3 import guards


def test_about_half_of_the_requests_lose_their_drafts(monkeypatch):
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda self, drafts: [
        setattr(request, "spec_token_ids", list(drafts)) for request in self.running
    ])  # fmt: skip
    scheduler = SimpleNamespace(running=[SimpleNamespace(spec_token_ids=[]) for _ in range(8)])
    bugs.drafts_taken_away(llm=None)
    lost = []
    for _ in range(50):
        Scheduler.update_draft_token_ids(scheduler, [7])
        assert all(request.spec_token_ids in ([], [7]) for request in scheduler.running)
        lost.append(sum(not request.spec_token_ids for request in scheduler.running))
    assert 150 < sum(lost) < 250 and {0, 8}.isdisjoint(set(lost[:3]))


def test_lists_start_as_a_pool_that_is_there_and_all_else_is_torch(monkeypatch):
    full = bugs.FullLists()
    assert full.empty(2, dtype=torch.uint8).dtype == torch.uint8 and full.arange is torch.arange
    monkeypatch.setattr(torch, "empty", None)  # may hold zeros, too
    before = bugs.BUGS["topk-ids"].effects()
    assert full.empty((64, 4), dtype=torch.int32, device="cpu").eq(0).all()
    assert bugs.BUGS["topk-ids"].effects() == before + 1


@pytest.mark.parametrize("name", bugs.BUGS)
def test_a_bug_names_guards_and_edges_that_are_there(name):
    bug = bugs.BUGS[name]
    assert set(bug.guards_off) <= set(guards.NAMES)
    assert set(bug.edges) <= set(edge_lengths(Edges(block=256, chunk=509, longest=9216)))


def test_each_guard_that_can_be_left_out_is_looked_at():
    """block-sizes refuses a start, so that there is nothing to look at."""
    seen = {guard for name in bugs.SETS["guards"] for guard in bugs.BUGS[name].guards_off}
    assert seen == set(guards.NAMES) - {guards.BLOCK_SIZES}
