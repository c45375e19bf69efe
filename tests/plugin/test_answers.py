"""What the watch makes of the API's answers, and that it never stands in their way; vLLM's own counters for drafts."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from vllm_exl3 import answers, service
from vllm_exl3.answers import Answers, AnswerWatch, Reader
from vllm_exl3.door.keys import Keys

from launcher import counters
from launcher import service as launcher_service

LOOP = "I apologise. "


def events(*datas) -> bytes:
    return b"".join(b"data: " + (d if isinstance(d, bytes) else json.dumps(d).encode()) + b"\n\n" for d in datas)


def chat(text, index=0, **delta):
    return {"choices": [{"index": index, "delta": {"content": text, **delta}}]}


# Reading: [(is it a stream, bytes), text by choice]
FORMS = {
    "chat": (True, events(chat("He"), chat("llo"), b"[DONE]"), {0: "Hello"}),
    "chat, two choices": (True, events(chat("a"), chat("b", 1), chat("c")), {0: "ac", 1: "b"}),
    "chat, reasoning": (True, events(chat(None, reasoning="hm"), chat("yes")), {0: "hmyes"}),
    "chat, tools": (
        True, events(chat(None, tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}])), {0: '{"a"'},
    ),
    "chat, role and usage alone": (
        True, events({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}, {"choices": [], "usage": {}}), {},
    ),
    "completions": (True, events({"choices": [{"index": 0, "text": "x"}]}), {0: "x"}),
    "responses": (
        True,
        b"event: response.output_text.delta\n"
        + events({"type": "response.output_text.delta", "delta": "ab", "output_index": 1})
        + events({"type": "response.output_text.done", "text": "ab"})
        + events({"type": "response.completed", "response": {"output": [{"content": [{"text": "ab"}]}]}}),
        {1: "ab"},
    ),
    "messages": (
        True,
        events({"type": "message_start"}, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "t"}},
               {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "h"}},
               {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
        {0: "th"},
    ),
    "an error and a comment": (True, b": keep-alive\n\n" + events({"error": {"message": "x"}}), {}),
    "whole chat": (
        False, json.dumps({"choices": [{"index": 0, "message": {"reasoning": "r", "content": "c"}}]}).encode(),
        {0: "rc"},
    ),
    "whole completion": (False, b'{"choices": [{"index": 0, "text": "c"}]}', {0: "c"}),
    "whole response": (
        False, b'{"object": "response", "output": [{"content": [{"text": "a"}]}, {"arguments": "b"}]}',
        {0: "ab"},
    ),
    "whole message": (False, b'{"type": "message", "content": [{"text": "a"}, {"thinking": "b"}]}', {0: "ab"}),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("form", FORMS)
def test_text_is_taken_out_of_every_form_however_it_is_cut(form, size):
    is_stream, body, expected = FORMS[form]
    reader = Reader(is_stream)
    for start in range(0, len(body), size):
        reader.feed(body[start : start + size], is_last=start + size >= len(body))
    assert {choice: tail.text for choice, tail in reader.tails.items()} == expected
    assert not reader.is_unreadable


@pytest.mark.parametrize("body", [
    b"data: {\n", b"data: 7\n", b'data: {"choices": 1}\n', b'data: {"choices": [{}]}\n', b"data: \xff\n",
    b'data: {"choices": [{"index": 0, "delta": {"content": ["x"]}}]}\n', b"x" * (answers.LONGEST_BYTES + 1),
])  # fmt: skip
@pytest.mark.parametrize("is_stream", [True, False])
def test_what_cannot_be_read_is_counted_and_dropped(body, is_stream):
    reader, books = Reader(is_stream), Answers()
    reader.feed(body, is_last=True)
    reader.feed(b"more", is_last=True)
    books.end(reader)
    assert (books.unread, reader.rest) == (1, b"")


def test_memory_of_one_response_is_bounded():
    reader = Reader(is_stream=True)
    for turn in range(300):
        reader.feed(events(chat("x" * 1000, turn)), is_last=False)
    assert len(reader.tails) == answers.MOST_CHOICES and not reader.rest


# Watching


def app_with(books: Answers, body) -> FastAPI:
    app = FastAPI()
    app.add_middleware(AnswerWatch, answers=books)
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        app.add_api_route(path, body, methods=["POST"])
    return app


async def post(app, path="/v1/chat/completions", on_message=lambda message: None) -> list[dict]:
    sent = []

    async def receive():
        await asyncio.sleep(0 if not sent else 10)  # nobody hangs up
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)
        on_message(message)

    await app({"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "",
               "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http"}, receive, send)  # fmt: skip
    return sent


def told(books: Answers) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(books)
    return counters.Counters(generate_latest(registry).decode())


def test_a_streamed_loop_is_told_while_it_runs_and_after():
    books, seen = Answers(), []

    def body():
        return StreamingResponse((events(chat(LOOP)) for _ in range(200)), media_type="text/event-stream")

    sent = asyncio.run(post(app_with(books, body), on_message=lambda _: seen.append(dict(told(books)))))
    assert b"".join(message.get("body", b"") for message in sent) == events(chat(LOOP)) * 200
    running = [(one[counters.ANSWERING], one[counters.REPEATING]) for one in seen]
    assert running[0] == (0, 0) and (1, 0) in running and running[-1] == (1, 1)
    assert counters.loops_row(told(books)) == "0 of 0 running answers repeat a short cycle, 1 of 1 ended so"


def test_a_whole_answer_is_judged_at_its_end():
    books = Answers()
    for text in (LOOP * 200, "All is well."):
        whole = {"choices": [{"index": 0, "message": {"content": text}}]}
        asyncio.run(post(app_with(books, lambda whole=whole: JSONResponse(whole))))
    assert counters.loops_row(told(books)) == "0 of 0 running answers repeat a short cycle, 1 of 2 ended so"


def test_a_response_that_breaks_off_is_no_longer_running():
    books = Answers()

    def broken():
        yield events(chat(LOOP))
        raise RuntimeError("the engine died")

    def body():
        return StreamingResponse(broken(), media_type="text/event-stream")

    with pytest.raises(BaseException, match=r"the engine died|unhandled"):
        asyncio.run(post(app_with(books, body)))
    assert (books.running, books.ended) == ({}, 1)


@pytest.mark.parametrize("path, status", [("/v1/embeddings", 200), ("/v1/chat/completions", 400)])
def test_other_routes_and_refusals_are_not_read(path, status):
    books = Answers()
    asyncio.run(post(app_with(books, lambda: JSONResponse({"error": "no"}, status)), path))
    assert (books.ended, books.unread) == (0, 0)


# The route


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer tok", "Bearer tokenX", "Basic token", "token"])
def test_another_token_is_refused(header):
    owner = Keys(["token"])
    assert not owner.open_with([(b"authorization", header.encode())])
    assert all(owner.open_with([(b"Authorization", word + b" token")]) for word in (b"Bearer", b"bearer"))
    assert not Keys([""]).open_with([(b"authorization", b"Bearer ")])


def test_the_launcher_knows_the_route_and_the_name_of_its_token():
    assert (launcher_service.RESET_PATH, launcher_service.TOKEN_NAME) == (service.RESET_PATH, service.TOKEN_NAME)


# vLLM's counters for drafts, which the local server has not


def test_acceptance_is_read_from_vllms_own_counters():
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    unregister_vllm_metrics()
    try:
        prom = SpecDecodingProm(SimpleNamespace(num_speculative_tokens=3), ["model_name", "engine"], {0: ["m", "0"]})
        text = generate_latest(REGISTRY).decode()
        assert counters.drafts_row(counters.Counters(text)) == "nothing drafted yet"
        stats = SpecDecodingStats.new(3)
        for accepted in (3, 2, 0, 1):
            stats.observe_draft(num_draft_tokens=3, num_accepted_tokens=accepted)
        prom.observe(stats)
        row = counters.drafts_row(counters.Counters(generate_latest(REGISTRY).decode()))
    finally:
        unregister_vllm_metrics()
    assert row == "50 % of 12 tokens accepted; by position 75 50 25 %"
