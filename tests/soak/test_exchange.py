"""Arms and judge through files: nobody gets a verdict before there is a floor, and a broken floor is told to all."""

import threading

import exchange
import judge
import pytest
from judge import Answer, Scored

GOOD = [Answer("s0", 0, [1, 2], [3, 4], cached=0)]
BAD = [Answer("s1", 2, [1, 2], [3, 5], cached=256)]


def score(answers):
    """Token 5 is two below the best, token 4 a tenth."""
    return [Scored(one, [{5: 2.0, 4: 0.1}.get(token, 0.0) for token in one.tokens]) for one in answers]


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "POLL_S", 0.005)
    thread = threading.Thread(target=exchange.serve, args=(tmp_path, "auto", score))
    thread.start()
    yield tmp_path
    (tmp_path / exchange.DONE).touch()
    thread.join(5)
    assert not thread.is_alive()


def in_background(*question):
    got = []

    def ask():
        try:
            got.append(exchange.ask(*question))
        except RuntimeError as error:
            got.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, got


def test_a_wrong_token_is_judged_by_the_plain_arms_floor(served):
    thread, got = in_background(served, "arm", "auto", False, BAD)
    thread.join(0.1)
    assert thread.is_alive(), "a verdict without a floor"
    plain = exchange.ask(served, "plain", "auto", True, GOOD)
    thread.join(5)
    assert plain["findings"] == [] and plain["bar"] == pytest.approx(3 * 0.1)
    assert [(one["session"], one["turn"], one["position"]) for one in got[0]["findings"]] == [("s1", 2, 1)]
    assert exchange.ask(served, "arm", "auto", False, GOOD)["findings"] == []  # a second question of the same arm


def test_each_judge_reads_the_floor_and_answers_its_own_arms(served):
    second = threading.Thread(target=exchange.serve, args=(served, "auto", score), kwargs={"number": 1})
    second.start()
    thread, got = in_background(served, "arm", "auto", False, BAD, None, 1)
    exchange.ask(served, "plain", "auto", True, GOOD, None, 0)
    thread.join(5)
    assert got[0]["bar"] == pytest.approx(3 * 0.1) and len(got[0]["findings"]) == 1
    (served / exchange.DONE).touch()
    second.join(5)
    assert len(list(served.glob("*.verdict.json"))) == 2


def test_a_broken_plain_arm_is_told_to_all(served):
    first = in_background(served, "arm", "auto", False, GOOD)
    second = in_background(served, "plain", "auto", True, BAD)
    for thread, got in (first, second):
        thread.join(5)
        assert "wrong itself" in str(got[0]) and isinstance(got[0], RuntimeError)


def test_who_still_waits_at_the_end_is_told(served):
    thread, got = in_background(served, "arm", "fp8", False, GOOD)  # nobody judges fp8
    (served / exchange.DONE).touch()
    thread.join(5)
    assert "ended before the judge answered" in str(got[0])


def test_what_goes_through_files_comes_back_whole(tmp_path):
    answer = Answer("s1", 2, [1], [2], None, True, "far")
    assert Answer(**judge.asdict(answer)) == answer
