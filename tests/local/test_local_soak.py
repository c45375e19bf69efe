"""A small soak over the API of the running local server: sessions at once, streams that are left and asked again."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launching import MODEL

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

import judge
import over_http
from sessions import Edges, Sizes, make_plan
from words import Words


@pytest.fixture(scope="module")
def plan():
    edges = Edges(block=256, chunk=2048, longest=300, graphs=(1, 2, 8))
    plan = make_plan(0, 6, edges, Sizes(asked=(7, 40), answer=(2, 12)), turns=(2, 2))
    assert any(turn.abort is not None for session in plan.sessions for turn in session.turns)
    # Pauses are for the engine's own mode; here they would be the test's whole time.
    return replace(plan, sessions=tuple(
        replace(session, turns=tuple(replace(turn, wait=turn.wait % 10) for turn in session.turns))
        for session in plan.sessions
    ))  # fmt: skip


def run(server, do):
    async def with_api():
        api = over_http.Api(f"http://127.0.0.1:{server.port}/v1", key="")
        async with api.client:
            return await do(api)

    return asyncio.run(with_api())


def test_sessions_at_once_say_what_they_say_alone(server, plan):
    said = run(server, lambda api: over_http.soak(api, api, Words(MODEL), plan, alone=1, shaped=1))
    assert said["findings"] == said["misshapen"] == [] and said["turns"] == plan.turns
    assert said["bar"] == judge.TIMES_THE_FLOOR * judge.LEAST_FLOOR  # in fp32 nothing is near a tie


def test_a_wrong_token_over_the_api_is_found(server, plan):
    async def one_wrong(api):
        (answer, *_) = await over_http.converse(api, Words(MODEL), plan.sessions[0], cold=True)
        tokens = [*answer.tokens[:-1], (answer.tokens[-1] + 1) % 900]
        return await over_http.score(api, [[replace(answer, tokens=tokens)]]), len(tokens) - 1

    scored, position = run(server, one_wrong)
    assert [one.position for one in judge.findings(scored, bar=0.2)] == [position]


def test_a_server_that_is_not_there_is_told(capsys, tmp_path):
    told = over_http.main(["--url", "http://127.0.0.1:9/v1", "--model", str(MODEL), "--report", str(tmp_path / "r")])
    assert told == 3 and "http://127.0.0.1:9/v1: no verdict: Connection error." in capsys.readouterr().err
