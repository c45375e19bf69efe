"""Reads the server's log: which phase the start is in, and what went wrong. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phase:
    name: str
    doc: str
    limit_s: int
    # The phase is over when a line of the log matches this.
    ends_with: re.Pattern[str]


# Limits are for a slow disk and two busy cores, several times what is normal.
PHASES = (
    Phase("imports", "Python packages are loaded and the model's configuration is read", 300,
          re.compile(r"Initializing a V1 LLM engine")),
    Phase("weights", "the checkpoint is read and decoded", 300, re.compile(r"Loading weights took")),
    Phase("engine", "memory is laid out and the model is warmed up", 300, re.compile(r"init engine \(profile")),
    Phase("http", "the API server opens its port", 120, re.compile(r"Application startup complete")),
)  # fmt: skip

LISTENING = "listening"

# `(Worker pid=12) ERROR 01-31 10:00:00 [file.py:10] ` in front of what a process says.
PREFIX = re.compile(
    r"^(\(\S+ pid=\d+\) )?((?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?"
)
EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)): (?P<message>.+)$")
# Says only that another process has said more.
SECOND_HAND = re.compile(
    r"See (?:root cause|stack trace)|encountered an issue"
    r"|Engine core initialization failed|initialization failed due to"
)
ADDRESS_IN_USE = re.compile(r"address already in use", re.IGNORECASE)
QUANTIZATION = re.compile(r"Initializing a V1 LLM engine .*?\bquantization=(?P<method>\w+)")
# The plugin's own errors are sentences for the user: Exl3FormatError, Exl3LoadError.
OUR_ERROR = re.compile(r"Exl3\w*Error")


@dataclass
class LogReader:
    """Fed with the log's lines, one by one."""

    index: int = 0  # of the phase that is going on; len(PHASES) when the server listens
    quantization: str | None = None
    exceptions: list[tuple[str, str]] = field(default_factory=list)  # (type, message)
    last_line: str = ""

    @property
    def phase(self) -> str:
        return PHASES[self.index].name if self.index < len(PHASES) else LISTENING

    @property
    def limit_s(self) -> int:
        return PHASES[min(self.index, len(PHASES) - 1)].limit_s

    def feed(self, line: str) -> None:
        text = strip_prefix(line)
        if not text.strip():
            return
        self.last_line = text.strip()
        if found := QUANTIZATION.search(text):
            self.quantization = found["method"]
        if found := EXCEPTION.match(text):
            self.note_exception(found["type"].rsplit(".", 1)[-1], found["message"])
        elif self.exceptions and self.exceptions[-1][1].endswith("for ModelConfig") and text.startswith("  "):
            # pydantic puts the reason on the line after the count of errors.
            self.exceptions[-1] = (self.exceptions[-1][0], text.strip())
        # A later phase's line also ends the phases before it: a line may be missing, never out of order.
        for index in range(self.index, len(PHASES)):
            if PHASES[index].ends_with.search(text):
                self.index = index + 1

    def note_exception(self, kind: str, message: str) -> None:
        if not SECOND_HAND.search(message):
            self.exceptions.append((kind, message.strip()))

    def reason(self) -> str:
        """The sentence that says best why the server died."""
        ours = [message for kind, message in self.exceptions if OUR_ERROR.fullmatch(kind)]
        if ours:
            return ours[0]
        if self.exceptions:
            kind, message = self.exceptions[0]
            return f"{kind}: {message}"
        return self.last_line or "it printed nothing"


def strip_prefix(line: str) -> str:
    return line.rstrip("\n")[PREFIX.match(line).end() :]
