"""Watches what the API answers: how many answers run, and how many of them have run into a loop. Numbers only.

The text of an answer is never logged or exported; its last characters are kept while it runs, and judged when somebody
reads /metrics. Nothing is computed per token but taking the text out of the event that has just been sent.
"""

import json
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vllm_exl3.repetition import Tail, cycle_of

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
# An event or a whole answer that is longer is not read: it would keep the server from its other work.
LONGEST_BYTES = 256 << 10
MOST_CHOICES = 64  # of one request that are watched


# Text of events, and of whole answers


def said_in(part: dict) -> str:
    """What one delta or message of a chat adds: reasoning, content, arguments of tool calls."""
    calls = (call.get("function") or {} for call in part.get("tool_calls") or ())
    texts = (part.get("reasoning"), part.get("content"), *(call.get("arguments") for call in calls))
    return "".join(text for text in texts if text)


def of_choices(said: dict, name: str) -> Iterator[tuple[int, str]]:
    for choice in said["choices"]:
        yield choice["index"], said_in(choice[name]) if choice.get(name) else choice.get("text") or ""


def of_event(event: dict) -> Iterator[tuple[int, str]]:
    """(choice, new text) of one event of a stream, in any of the API's forms. Events that repeat the text whole at the
    end, as the Responses API's do, add nothing."""
    delta = event.get("delta")
    if "choices" in event:
        yield from of_choices(event, "delta")
    elif isinstance(delta, str) and event["type"].endswith(".delta"):
        yield event.get("output_index", 0), delta
    elif event.get("type") == "content_block_delta":
        yield 0, delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""


def of_whole(answer: dict) -> Iterator[tuple[int, str]]:
    """(choice, text) of an answer that comes at once."""
    if "choices" in answer:
        yield from of_choices(answer, "message")
    elif answer.get("object") == "response":
        for item in answer["output"]:
            yield 0, item.get("arguments") or ""
            yield from ((0, part.get("text") or "") for part in item.get("content") or ())
    elif answer.get("type") == "message":
        yield from ((0, part.get("text") or part.get("thinking") or "") for part in answer["content"])


# Books


class Answers:
    """Counts of answers, as a collector of prometheus_client."""

    def __init__(self) -> None:
        self.running: dict[int, Reader] = {}  # by identity
        self.ended = 0
        self.ended_repeating = 0
        self.unread = 0

    def end(self, reader: "Reader") -> None:
        self.running.pop(id(reader), None)
        self.ended += len(reader.tails)
        self.ended_repeating += reader.repeating
        self.unread += reader.is_unreadable

    def describe(self) -> list:
        """Nothing: what is there is known when it is read."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """May run in another thread than the answers."""
        readers = list(self.running.values())
        running = sum(len(reader.tails) for reader in readers)
        repeating = sum(reader.repeating for reader in readers)
        yield GaugeMetricFamily("exl3:answers_running", "Streamed answers that have begun.", running)
        yield GaugeMetricFamily("exl3:answers_repeating", "Of these, how many end in a repeated cycle now.", repeating)
        yield CounterMetricFamily("exl3:answers_ended", "Answers that are over.", self.ended)
        yield CounterMetricFamily(
            "exl3:answers_ended_repeating", "Of these, how many ended in a repeated cycle.", self.ended_repeating
        )
        yield CounterMetricFamily("exl3:responses_unread", "Responses that could not be read.", self.unread)


class Reader:
    """One response: takes the text out of its bytes and keeps the end of each choice."""

    def __init__(self, is_stream: bool) -> None:
        self.is_stream = is_stream
        self.tails: dict[int, Tail] = {}  # by choice
        self.rest = b""  # of a line, or of an answer, that is not whole yet
        self.is_unreadable = False

    @property
    def repeating(self) -> int:
        return sum(1 for tail in list(self.tails.values()) if cycle_of(tail.text))

    def feed(self, body: bytes, *, is_last: bool) -> None:
        """Never raises: what cannot be read is counted, and no longer watched."""
        if self.is_unreadable or not (body or is_last):
            return
        try:
            self.rest += body
            self._read_lines() if self.is_stream else self._read_whole(is_last)
            if len(self.rest) > LONGEST_BYTES:
                raise ValueError("too long")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.is_unreadable, self.rest = True, b""

    def _read_lines(self) -> None:
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                self._keep(of_event(json.loads(line[5:])))

    def _read_whole(self, is_last: bool) -> None:
        if is_last and len(self.rest) <= LONGEST_BYTES:
            body, self.rest = self.rest, b""
            self._keep(of_whole(json.loads(body)))

    def _keep(self, texts: Iterator[tuple[int, str]]) -> None:
        for choice, text in texts:
            if text and (choice in self.tails or len(self.tails) < MOST_CHOICES):
                self.tails.setdefault(choice, Tail()).add(text)


# Middleware


class AnswerWatch:
    """ASGI middleware that passes every message on first and reads it then."""

    def __init__(self, app, answers: Answers) -> None:
        self.app, self.answers = app, answers

    async def __call__(self, scope, receive, send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in PATHS:
            await self.app(scope, receive, send)
            return
        reader = None

        async def send_and_read(message) -> None:
            nonlocal reader
            await send(message)
            if message["type"] == "http.response.start" and message["status"] == 200:
                reader = Reader(is_stream=is_event_stream(message))
                if reader.is_stream:
                    self.answers.running[id(reader)] = reader
            elif message["type"] == "http.response.body" and reader:
                reader.feed(message.get("body", b""), is_last=not message.get("more_body", False))

        try:
            await self.app(scope, receive, send_and_read)
        finally:
            if reader:
                self.answers.end(reader)


def is_event_stream(message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
    )
