"""Questions with known answers: the start counts only when they are answered correctly."""

from __future__ import annotations

import http.client
import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import console, long_prompt, paths
from launcher.errors import Exit, LauncherError
from launcher.settings import HOST, MODEL_ID

# One question of each kind is asked at a start: a fact shows that the experts are decoded right,
# counting that the state is carried from token to token.
START_KINDS = ("fact", "count")
# A sentence to be found in a text of a given length, asked wherever the list has one: attention over few pages and over
# many runs other kernels, which have hung where nothing else did.
LONG = "long"
# A sentence to be found in a text that is asked twice, cold and from the prefix cache (cached_prefix.py).
CACHED = "cached"
MAX_TOKENS = 512
ANSWER_TIMEOUT_S = 180
TOKENIZE_TIMEOUT_S = 20
# Asked without the key, or under a name that is not the machine's.
DOOR_PATH, STRANGE_HOST = "/version", "rebound.invalid"
# What a wrong answer leads to, as the end of its sentence.
AT_START = "so the server was stopped"
IN_SERVICE = "so trust none of its answers; it still runs, keep its log for an issue and `stop` it"


@dataclass(frozen=True)
class Question:
    question: str
    must_contain: tuple[str, ...]
    kind: str
    # Of kinds "long" and "cached": how many tokens the prompt has (found at the time), the sentence to be found in it,
    # and its own time.
    tokens: int = 0
    needle: str = ""
    limit_s: float = 0

    @property
    def label(self) -> str:
        return f"({self.tokens:,} tokens of text) {self.question}" if self.tokens else self.question


@dataclass(frozen=True)
class Answer:
    text: str
    finished: bool  # the model ended by itself


def read_questions(path: Path) -> list[Question]:
    try:
        entries = json.loads(paths.text_of(path))
        questions = [read_question(entry) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LauncherError(
            f"{path}: not readable as a list of question, must_contain and kind ({type(error).__name__}: {error}); "
            f"a start proves itself with these, so give another file with --canary."
        ) from error
    for question in questions:
        if not question.question.strip() or not any(part.strip() for part in question.must_contain):
            raise LauncherError(f"{path}: the question {question.question!r} has no expected answer; add must_contain.")
    return questions


def read_question(entry: dict) -> Question:
    plain = Question(str(entry["question"]), tuple(map(str, entry["must_contain"])), str(entry["kind"]))
    if plain.kind == CACHED:
        return replace(plain, needle=str(entry["needle"]))
    if plain.kind != LONG:
        return plain
    return replace(plain, tokens=int(entry["tokens"]), needle=str(entry["needle"]), limit_s=float(entry["limit_s"]))


def questions_for_start(path: Path) -> list[Question]:
    chosen, questions = {}, read_questions(path)
    for question in questions:
        chosen.setdefault(question.kind, question)
    missing = [kind for kind in START_KINDS if kind not in chosen]
    if missing:
        raise LauncherError(
            f"{path}: has no question of kind {' or '.join(missing)}, a start asks one of each; add one."
        )
    return [
        *(chosen[kind] for kind in START_KINDS),
        *(question for question in questions if question.kind == LONG),
        *(chosen[kind] for kind in (CACHED,) if kind in chosen),
    ]


def fault(question: Question, answer: Answer) -> str | None:
    """What is wrong with an answer, or None if it is right."""
    if not answer.finished:
        return "it did not end by itself"
    if question.kind == "count":
        wanted, got = numbers(" ".join(question.must_contain)), numbers(answer.text)
        return None if got == wanted else f"expected exactly the numbers {' '.join(wanted)}"
    missing = [part for part in question.must_contain if not contains(answer.text, part)]
    return f"expected {' and '.join(map(repr, missing))} in it" if missing else None


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def contains(text: str, part: str) -> bool:
    """Whether `part` is in `text`, letter case aside; 8888 is not in 18888."""
    part = part.strip()
    before = r"(?<!\d)" if part[:1].isdigit() else ""
    after = r"(?!\d)" if part[-1:].isdigit() else ""
    return re.search(before + re.escape(part) + after, text, re.IGNORECASE) is not None


def read_answer(body: bytes) -> Answer:
    choice = json.loads(body)["choices"][0]
    return Answer(choice["message"].get("content") or "", choice["finish_reason"] == "stop")


def ask(
    port: int,
    question: str,
    api_key: str,
    timeout_s: float = ANSWER_TIMEOUT_S,
    host: str = HOST,
    max_tokens: int = MAX_TOKENS,
) -> Answer:
    """One question at temperature 0 through the server's public door."""
    body = json.dumps({"model": MODEL_ID, "messages": [{"role": "user", "content": question}],
                       "temperature": 0, "max_tokens": max_tokens})  # fmt: skip
    status, answer = request(port, "POST", "/v1/chat/completions", body, headers_with(api_key), timeout_s, host)
    if status != 200:
        raise LauncherError(
            f"The server answered a chat request with status {status}: {answer[:300].decode(errors='replace')}",
            Exit.SERVER,
        )
    return read_answer(answer)


def headers_with(api_key: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def request(port: int, method: str, path: str, body: str | None = None, headers: dict | None = None,
            timeout_s: float = 5, host: str = HOST) -> tuple[int, bytes]:  # fmt: skip
    """A plain request to a server on this machine, past any proxy of the caller."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def is_healthy(port: int, host: str = HOST) -> bool:
    try:
        return request(port, "GET", "/health", host=host)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def refuse_open_door(port: int, api_key: str, host: str = HOST) -> None:
    """Raises LauncherError where the server answers somebody whom its door has to refuse."""
    strange = {} if api_key else {"Host": STRANGE_HOST}
    status, _ = request(port, "GET", DOOR_PATH, headers=strange, host=host)
    wanted = 401 if api_key else 403
    if status != wanted:
        who = "a request without its key" if api_key else f"a request for {STRANGE_HOST}"
        raise LauncherError(
            f"door: the server answered {who} with status {status}, and has to refuse it with {wanted}; its plugin is "
            f"another than this checkout's, or another program is in front of it.",
            Exit.SERVER,
        )


def count_tokens(port: int, text: str, api_key: str, host: str = HOST) -> tuple[int, int]:
    """(tokens of a prompt with the chat template, the longest conversation), as the server counts."""
    body = json.dumps({"model": MODEL_ID, "messages": [{"role": "user", "content": text}]})
    status, answer = request(port, "POST", "/tokenize", body, headers_with(api_key), TOKENIZE_TIMEOUT_S, host)
    if status != 200:
        raise LauncherError(
            f"The server counted no tokens, status {status}: {answer[:300].decode(errors='replace')}", Exit.SERVER
        )
    found = json.loads(answer)
    return int(found["count"]), int(found["max_model_len"])


def prompt_of(question: Question, port: int, api_key: str, host: str, max_tokens: int) -> str | None:
    """What is sent; None where a long question and its answer are longer than the server takes."""
    if not question.tokens:
        return question.question
    _, longest = count_tokens(port, question.question, api_key, host)
    if question.tokens + max_tokens > longest:
        console.say(
            f"Note: the question of {question.tokens:,} tokens is left out: with {max_tokens:,} for its answer it is "
            f"longer than MAX_MODEL_LEN, {longest:,}."
        )
        return None
    return long_prompt.make(
        question.needle, question.question, question.tokens, lambda text: count_tokens(port, text, api_key, host)[0]
    )


def check_answers(
    port: int,
    questions: list[Question],
    api_key: str,
    host: str = HOST,
    max_tokens: int = MAX_TOKENS,
    timeout_s: float = ANSWER_TIMEOUT_S,
    consequence: str = AT_START,
) -> list[tuple[Question, Answer]]:
    """Asks every question, all within `timeout_s`; raises LauncherError at the first wrong answer."""
    answered, deadline = [], time.monotonic() + timeout_s
    for question in questions:
        limit_s, whose = timeout_s, "all questions"
        left_s = max(deadline - time.monotonic(), 0.001)
        if question.limit_s and question.limit_s < left_s:
            left_s = limit_s = question.limit_s
            whose = "this question"
        try:
            prompt = prompt_of(question, port, api_key, host, max_tokens)
            if prompt is None:
                continue
            answer = ask(port, prompt, api_key, left_s, host, max_tokens)
        except TimeoutError as error:
            raise LauncherError(
                f"canary: no answer to {question.label!r}, {limit_s:g} s for {whose} are over; the engine "
                f"stands still or is far too slow, look at the log.",
                Exit.SERVER,
            ) from error
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise LauncherError(
                f"canary: no answer to {question.label!r} ({type(error).__name__}: {error}); look at the log.",
                Exit.SERVER,
            ) from error
        refuse_wrong(question, answer, consequence)
        answered.append((question, answer))
    return answered


def refuse_wrong(question: Question, answer: Answer, consequence: str = AT_START) -> None:
    if wrong := fault(question, answer):
        raise LauncherError(
            f"canary: to {question.label!r} the model answered {answer.text[:200]!r}, {wrong}; the weights, the "
            f"decoder or the engine are damaged, {consequence}.",
            Exit.WRONG_ANSWER,
        )
