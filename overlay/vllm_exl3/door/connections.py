"""Connections that send nothing, or slowly, or too many at once: uvicorn has no limit for them.

Extends whichever HTTP protocol class uvicorn has chosen. Its `h11_max_*` limits, which vLLM passes on, count for h11
only, and uvicorn takes httptools where that is installed.
"""

import time

from vllm_exl3.door.rules import Rules

LARGEST_HEAD_BYTES = 64 << 10

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\ncontent-length: 0\r\n\r\n"


def guard(config, rules: Rules) -> None:
    """Once for a uvicorn.Config, before its server listens."""
    if not getattr(config.http_protocol_class, "is_guarded", False):
        config.http_protocol_class = guarded(config.http_protocol_class, rules)


def is_idle(connection) -> bool:
    """Whether no request of it is being answered."""
    return connection.cycle is None or connection.cycle.response_complete


def guarded(base: type, rules: Rules) -> type:
    class Guarded(base):
        is_guarded = True

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self.head_bytes, self.head_timer, self.since = 0, None, time.monotonic()
            self._expect_head()
            if len(self.connections) > rules.max_connections:
                self._make_room()

        def data_received(self, data: bytes) -> None:
            answered = self.cycle
            self._expect_head()
            super().data_received(data)
            if self.cycle is not answered or not is_idle(self):
                self._head_is_over()
                return
            self.head_bytes += len(data)
            if self.head_bytes > LARGEST_HEAD_BYTES:
                self._close_with(TOO_LARGE)

        def handle_websocket_upgrade(self, *arguments) -> None:
            self._head_is_over()
            super().handle_websocket_upgrade(*arguments)

        def connection_lost(self, exc) -> None:
            self._head_is_over()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            if self.head_timer is None and is_idle(self):
                self.head_timer = self.loop.call_later(rules.receive_timeout_s, self._close_with, b"")

        def _head_is_over(self) -> None:
            self.head_bytes = 0
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def _make_room(self) -> None:
            """Ends the oldest connection that waits for nothing; this one where all are at work."""
            idle = [one for one in list(self.connections) if one is not self and is_idle(one)]
            if idle:
                min(idle, key=lambda one: one.since)._close_with(b"")
            else:
                self._close_with(TOO_MANY)

        def _close_with(self, last_words: bytes) -> None:
            self._head_is_over()
            if not self.transport.is_closing():
                self.transport.write(last_words)
                self.transport.close()

    return Guarded
