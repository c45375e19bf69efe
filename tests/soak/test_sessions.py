"""What every plan of a soak must hold, whatever the engine's sizes."""

from dataclasses import replace

import pytest
import sessions
from hypothesis import given, settings
from hypothesis import strategies as some
from sessions import KINDS, Edges, Sizes, edge_lengths, from_json, make_plan, shrink, to_json

EDGES = some.builds(
    Edges, block=some.integers(16, 4608), chunk=some.integers(32, 8192), longest=some.integers(400, 10_000),
    graphs=some.just((1, 2, 4, 8)),
)  # fmt: skip
SEEDS = some.integers(0, 2**32)
FULL = Edges(block=256, chunk=509, longest=9216)


@given(EDGES, SEEDS)
@settings(max_examples=60, deadline=None)
def test_every_edge_is_hit_and_every_bound_is_kept(edges, seed):
    plan, sizes = make_plan(seed, len(edge_lengths(edges)), edges), Sizes()
    lengths = [length for session in plan.sessions for length in session.prompt_lengths()]
    assert set(edge_lengths(edges).values()) <= set(lengths)
    for session in plan.sessions:
        assert session.turns and session.shared >= 0
        for index, (length, turn) in enumerate(zip(session.prompt_lengths(), session.turns, strict=True)):
            assert length + turn.answer <= edges.longest
            assert turn.edge is None or edge_lengths(edges)[turn.edge] == length
            assert turn.kind in KINDS and 1 <= turn.asked <= sizes.asked[1] and 1 <= turn.answer <= sizes.answer[1]
            assert not index or (turn.asked >= sizes.asked[0] and turn.answer >= sizes.answer[0])


@given(EDGES, SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_seed_is_a_plan_and_a_plan_is_a_file(edges, seed):
    plan = make_plan(seed, 12, edges)
    assert make_plan(seed, 12, edges) == plan == from_json(to_json(plan))
    assert make_plan(seed + 1, 12, edges) != plan


def test_a_plan_of_usual_size_has_all_that_agents_do():
    plan = make_plan(0, len(edge_lengths(FULL)), FULL)
    turns = [turn for session in plan.sessions for turn in session.turns]
    assert {turn.kind for turn in turns} == set(KINDS)
    assert any(length > 8192 for session in plan.sessions for length in session.prompt_lengths())
    assert {2047, 2048, 2049, 2050, 2051, 255, 256, 257} <= {n for s in plan.sessions for n in s.prompt_lengths()}
    prefixes = [session.prefix for session in plan.sessions if session.shared > FULL.block]
    assert len(set(prefixes)) < len(prefixes)  # shared, beyond a block
    assert any(turn.abort is not None and turn.abort <= 3 for turn in turns)
    assert any(turn.abort is not None and turn.abort > 3 for turn in turns)
    assert any(index and turn.wait > 50 for s in plan.sessions for index, turn in enumerate(s.turns))
    assert any(s.logprobs for s in plan.sessions) and not all(s.logprobs for s in plan.sessions)


def test_first_prompts_may_have_chosen_lengths_only():
    plan = make_plan(0, 12, FULL, first=["graph 1 +0"])
    assert {session.prompt_lengths()[0] for session in plan.sessions} == {1}
    assert max(length for session in plan.sessions for length in session.prompt_lengths()) > FULL.sparse


def test_many_sessions_begin_spread_over_the_run():
    """All at once, each would come back after its states were given to others, and nothing would hit the cache."""
    begins = lambda plan: sorted(session.turns[0].wait for session in plan.sessions)
    many, few = begins(make_plan(0, 400, FULL)), begins(make_plan(0, 4, FULL))
    assert many[len(many) // 2] > 20 * len(many) and many[-1] > 15_000 and few[-1] < 200
    assert begins(make_plan(0, 400, FULL, Sizes(start=50)))[-1] < 50


def test_what_does_not_fit_is_refused_in_words():
    with pytest.raises(ValueError, match="do not fit into a context of 20"):
        make_plan(0, 1, replace(FULL, longest=20))


@pytest.mark.parametrize("text", ["{}", '{"seed": 1, "edges": {"graphs": []}, "sessions": []}'])
def test_a_file_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="no plan of a soak"):
        from_json(text)


# Shrinking


@given(some.sets(some.integers(0, 39), min_size=1, max_size=2))
@settings(max_examples=30, deadline=None)
def test_a_failure_of_few_sessions_is_shrunk_to_them(guilty):
    plan = make_plan(3, 40, FULL)
    names = {plan.sessions[i].name for i in guilty}
    asked = []

    def fails(candidate):
        asked.append(candidate)
        return names <= {session.name for session in candidate.sessions}

    small, used = shrink(plan, fails, reruns=60)
    assert {session.name for session in small.sessions} == names
    assert all(len(session.turns) == 1 for session in small.sessions)
    assert used == len(asked) <= 60


def test_shrinking_keeps_the_turns_that_are_needed_and_ends():
    plan = make_plan(3, 40, FULL)
    name, turns = next((s.name, len(s.turns)) for s in plan.sessions if len(s.turns) > 2)

    def fails(candidate):
        return any(s.name == name and len(s.turns) >= turns - 1 for s in candidate.sessions)

    small, _ = shrink(plan, fails, reruns=60)
    assert [(s.name, len(s.turns)) for s in small.sessions] == [(name, turns - 1)]
    assert shrink(plan, lambda _: True, reruns=3)[1] == 3
    assert shrink(plan, lambda _: False, reruns=500)[0] == plan  # what never fails again stays whole


def test_an_edge_that_no_session_has_would_be_seen():
    """Planted: prompts one token longer than planned."""
    plan = make_plan(0, len(edge_lengths(FULL)), FULL)
    longer = [replace(session, shared=session.shared + 1) for session in plan.sessions]
    moved = {length for session in longer for length in session.prompt_lengths()[:1]}
    assert not set(sessions.edge_lengths(FULL).values()) <= moved
