import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import canary, long_prompt
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
    ('[{"question": "q", "must_contain": ["a"], "kind": "long", "tokens": 65}]', "not readable.*needle"),
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


# The list of the model


def test_the_list_of_the_model_has_what_a_start_asks():
    path = canary.Path(canary.__file__).parent / "canaries" / f"{canary.MODEL_ID}.json"
    questions = canary.read_questions(path)
    assert [question.kind for question in questions].count("fact") >= 3
    assert len({question.question for question in questions}) == len(questions)
    asked = canary.questions_for_start(path)
    assert [question.kind for question in asked] == ["fact", "count", "long", "long", "cached"]
    assert [question.tokens for question in asked if question.kind == "long"] == [65, 14_000]
    for question in asked:
        assert question.kind != "long" or question.limit_s
        assert question.kind not in ("long", "cached") or question.must_contain[0] in question.needle
        assert not any(canary.contains(question.question, part) for part in question.must_contain)


# Long questions

NEEDLE, ASKED = "The number of the box is 4827.", "What is the number of the box?"


def counter(per_word: dict[str, int], template: int):
    """Tokens as a vocabulary might have them: some words are one, some are more."""
    return lambda text: template + sum(per_word.get(word, 1) for word in text.split())


@given(st.integers(0, 3000), st.integers(0, 12), st.lists(st.integers(1, 4), min_size=len(set(long_prompt.FILLER))))
def test_a_long_prompt_has_exactly_its_tokens(room, template, sizes):
    sizes = dict(zip(dict.fromkeys(long_prompt.FILLER), sizes, strict=False)) | {long_prompt.PAD: 1}
    count = counter(sizes, template)
    tokens = count(f"{NEEDLE} {ASKED}") + room
    text = long_prompt.make(NEEDLE, ASKED, tokens, count)
    assert count(text) == tokens
    assert text.count(NEEDLE) == 1 and text.endswith(f"\n\n{ASKED}")


def test_the_needle_is_in_the_middle():
    words = long_prompt.make(NEEDLE, ASKED, 2000, counter({}, 0)).split()
    assert 0.4 < words.index("4827.") / len(words) < 0.6


def test_a_prompt_that_cannot_be_so_short_is_refused():
    with pytest.raises(LauncherError, match=r"no prompt of 9 tokens could be made .* the shortest has 14"):
        long_prompt.make(NEEDLE, ASKED, 9, counter({}, 0))


class Api(BaseHTTPRequestHandler):
    """Counts words, answers with the number that follows "is", and can take its time."""

    delay_s = 0.0
    longest = 262_144
    prompts: list[str] = []  # noqa: RUF012 - set anew by the fixture

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        reply = {"count": len(text.split()) + 8, "max_model_len": self.longest}
        if self.path != "/tokenize":
            self.prompts.append(text)
            time.sleep(self.delay_s)
            number = canary.re.search(r"box is (\d+)", text)
            reply = {"choices": [{"message": {"content": number[1] if number else "8888"}, "finish_reason": "stop"}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def api(unused_port):
    handler = type("OwnApi", (Api,), {"prompts": []})
    server = ThreadingHTTPServer(("127.0.0.1", unused_port), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield handler, unused_port
    server.shutdown()
    server.server_close()


def long(tokens: int, **changes) -> Question:
    return Question(ASKED, ("4827",), "long", **{"tokens": tokens, "needle": NEEDLE, "limit_s": 20, **changes})


@pytest.mark.parametrize("tokens", [65, 14_000])
def test_a_long_question_is_sent_with_its_tokens_and_answered_by_its_needle(api, tokens):
    handler, port = api
    answered = canary.check_answers(port, [long(tokens), FACT], "")
    assert [answer.text for _, answer in answered] == ["4827", "8888"]
    assert len(handler.prompts[0].split()) + 8 == tokens


def test_a_needle_that_is_not_found_is_a_wrong_answer(api):
    _, port = api
    with pytest.raises(LauncherError, match=r"to '\(65 tokens of text\) What is the number of the box\?'") as caught:
        canary.check_answers(port, [long(65, needle="The number of the box is 1111.")], "")
    assert caught.value.code == Exit.WRONG_ANSWER


def test_a_long_question_that_the_server_cannot_take_is_left_out(api, capsys):
    handler, port = api
    handler.longest = 2048
    assert [question for question, _ in canary.check_answers(port, [long(14_000), FACT], "")] == [FACT]
    assert "Note: the question of 14,000 tokens is left out" in capsys.readouterr().err
    assert handler.prompts == [FACT.question]


def test_a_long_question_has_a_time_of_its_own(api):
    handler, port = api
    handler.delay_s = 30
    with pytest.raises(LauncherError, match=r"\(65 tokens of text\).*, 0.5 s for this question are over") as caught:
        canary.check_answers(port, [long(65, limit_s=0.5)], "")
    assert caught.value.code == Exit.SERVER
