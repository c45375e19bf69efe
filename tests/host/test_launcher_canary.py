import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import canary
from launcher.canary import Answer, Question
from launcher.errors import Exit, LauncherError

FACT = Question("Which port?", ("8888",), "fact")
COUNT = Question("Count from 3 to 7.", ("3, 4, 5, 6, 7",), "count")


@pytest.mark.parametrize(("question", "text"), [
    (FACT, "8888"), (FACT, "The port is 8888."), (FACT, "http://127.0.0.1:8888/v1"),
    (COUNT, "3, 4, 5, 6, 7"), (COUNT, "3 4 5 6 7."), (COUNT, "\n3\n4\n5\n6\n7"),
    (Question("Q", ("RoCE v2", "start"), "fact"), "It needs roce V2 at START."),
])  # fmt: skip
def test_right_answers_pass(question, text):
    assert canary.fault(question, Answer(text, finished=True)) is None


@pytest.mark.parametrize(("question", "text"), [
    (FACT, ""), (FACT, "8889"), (FACT, "18888"), (FACT, "88880"), (FACT, "!!!!!!!!"), (FACT, "888 8"),
    (COUNT, "3, 4, 5, 6"), (COUNT, "3, 4, 5, 6, 7, 8"), (COUNT, "2, 3, 4, 5, 6, 7"), (COUNT, "3, 5, 4, 6, 7"),
    (COUNT, "34567"), (COUNT, "13, 4, 5, 6, 7"), (COUNT, "3, 4, 5, 6, 7, 3, 4, 5, 6, 7"), (COUNT, ""),
    (Question("Q", ("a", "b"), "fact"), "only a"),
])  # fmt: skip
def test_wrong_answers_fail(question, text):
    assert canary.fault(question, Answer(text, finished=True))


def test_right_answer_that_does_not_end_fails():
    assert canary.fault(FACT, Answer("8888", finished=False))


@given(st.integers(0, 98), st.integers(1, 40), st.data())
def test_one_changed_number_in_a_count_is_noticed(first, length, data):
    wanted = list(range(first, first + length))
    question = Question("Count.", (", ".join(map(str, wanted)),), "count")
    said = list(wanted)
    place = data.draw(st.integers(0, length - 1))
    said[place] = data.draw(st.integers(0, 200).filter(lambda n: n != wanted[place]))
    assert canary.fault(question, Answer(", ".join(map(str, wanted)), finished=True)) is None
    assert canary.fault(question, Answer(", ".join(map(str, said)), finished=True))


def test_start_asks_one_question_of_each_kind(checkpoint_folder):
    chosen = canary.questions_for_start(checkpoint_folder / "canary.json")
    assert [question.kind for question in chosen] == list(canary.START_KINDS)


@pytest.mark.parametrize(("text", "expected"), [
    ("", "not readable"), ("{}", "no question of kind"),
    ('[{"question": "q"}]', "not readable"), ("[1]", "not readable"),
    ('[{"question": "q", "must_contain": [], "kind": "fact"}]', "no expected answer"),
    ('[{"question": "q", "must_contain": [" "], "kind": "fact"}]', "no expected answer"),
    ('[{"question": "q", "must_contain": ["a"], "kind": "fact"}]', "no question of kind count"),
])  # fmt: skip
def test_file_without_usable_questions_is_refused(tmp_path, text, expected):
    path = tmp_path / "canary.json"
    path.write_text(text)
    with pytest.raises(LauncherError, match=expected) as caught:
        canary.questions_for_start(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(LauncherError, match="--canary"):
        canary.questions_for_start(tmp_path / "none.json")


def test_wrong_answer_has_an_exit_code_of_its_own(monkeypatch):
    monkeypatch.setattr(canary, "ask", lambda *_, **__: Answer("8889", finished=True))
    with pytest.raises(LauncherError, match="8889") as caught:
        canary.check_answers(1, [FACT], "")
    assert caught.value.code == Exit.WRONG_ANSWER


def test_refused_connection_is_no_wrong_answer(unused_port):
    with pytest.raises(LauncherError, match="no answer") as caught:
        canary.check_answers(unused_port, [FACT], "")
    assert caught.value.code == Exit.SERVER


def test_answer_without_content_is_empty():
    body = {"choices": [{"message": {"content": None, "reasoning": "hm"}, "finish_reason": "stop"}]}
    assert canary.read_answer(json.dumps(body).encode()) == Answer("", finished=True)
