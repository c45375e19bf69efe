"""Progress for people: one line per named phase, with its elapsed time. Goes to stderr."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import contextmanager

HEARTBEAT_S = 30


class Progress:
    """A phase that is going on. On a terminal its line is redrawn, elsewhere a heartbeat is printed."""

    def __init__(self, name: str, stream=None):
        self.name = name
        self.stream = stream or sys.stderr
        self.began = time.monotonic()
        self.last_print = self.began
        self.is_terminal = can_redraw(self.stream)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def tick(self, detail: str = "") -> None:
        text = f"  {self.name:<12} {self.elapsed_s:6.0f} s  {detail}"
        if self.is_terminal:
            # A line that wraps could not be drawn over.
            self.stream.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
            self.stream.flush()
        elif time.monotonic() - self.last_print >= HEARTBEAT_S:
            self.last_print = time.monotonic()
            self.stream.write(f"{text} ...\n")
            self.stream.flush()

    def end(self, word: str) -> None:
        start = "\r\033[K" if self.is_terminal else ""
        self.stream.write(f"{start}  {self.name:<12} {self.elapsed_s:6.1f} s  {word}\n")
        self.stream.flush()


def can_redraw(stream) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def phase(name: str):
    progress = Progress(name)
    progress.tick()
    try:
        yield progress
    except BaseException:
        progress.end("failed")
        raise
    progress.end("done")


def say(text: str) -> None:
    start = "\r\033[K" if can_redraw(sys.stderr) else ""  # over a phase's line, which is drawn again
    print(start + text, file=sys.stderr, flush=True)


def program() -> str:
    """How the user calls us, for the commands that messages name."""
    return _program


def set_program(name: str) -> None:
    global _program
    _program = name


_program = "./start.sh"
