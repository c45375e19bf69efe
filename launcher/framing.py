"""Tells what a command on a node answers from what the node's login shell says of its own.

What startup files, a message of the day or something in the background write arrives on the same stream as the answer.
So the command runs inside of a wrapper that puts a mark, another one for each call, before and behind what the command
writes, and the exit status into the one behind.
"""

from __future__ import annotations

import json
import re

# $1 the mark, $2 the command as `word` has it. Free of what fish and csh read otherwise than a POSIX shell does: ' \ !
WRAPPER = (
    'printf "%s<" "$1"; printf "%s<" "$1" >&2; (eval "$(printf %b "$2")"); code=$?; '
    'printf "%s>%d;" "$1" "$code"; printf "%s>%d;" "$1" "$code" >&2; exit "$code"'
)
PLAIN = 'eval "exec $(printf %b "$1")"'
AWKWARD = re.compile(rb"['\\!\x00-\x1f\x7f]")
MOST_NOISE_BYTES = 4096
MOST_SHOWN = 60


def word(line: bytes) -> bytes:
    """A line for `sh` as one word that every login shell takes alike, and that `printf %b` turns into the line."""
    return b"'" + AWKWARD.sub(lambda found: b"\\0%03o" % found[0][0], line) + b"'"


def framed(line: bytes, mark: str) -> bytes:
    """What the login shell is given so that `sh` runs the line, and marks what it answers."""
    return b"sh -c '%s' sh %s %s" % (WRAPPER.encode(), mark.encode(), word(line))


def unframed(line: bytes) -> bytes:
    """The same without marks, for a person at a terminal."""
    return b"sh -c '%s' sh %s" % (PLAIN.encode(), word(line))


class Answer:
    """Takes a stream piece by piece. Without a mark, as on this machine, all of it is the answer."""

    def __init__(self, mark: str) -> None:
        self.opening, self.closing = f"{mark}<".encode(), f"{mark}>".encode()
        self.began = not mark
        self.code: int | None = None  # of the command; None: it has not ended, or nobody was told
        self.noise = b""  # what came before and after it; of much of it the beginning
        self.rest = b""

    def feed(self, piece: bytes) -> bytes:
        """What of it belongs to the answer. Holds back only what may be the beginning of a mark."""
        data, self.rest = self.rest + piece, b""
        if not self.began:
            before, found, data = data.partition(self.opening)
            if not found:
                self.rest = before[len(before) - overlap(before, self.opening) :]
                self.hear(before[: len(before) - len(self.rest)])
                return b""
            self.hear(before)
            self.began = True
        if self.opening == b"<":
            return data
        return self.until_end(data)

    def until_end(self, data: bytes) -> bytes:
        if self.code is not None:
            self.hear(data)
            return b""
        answer, found, behind = data.partition(self.closing)
        if not found:
            self.rest = answer[len(answer) - overlap(answer, self.closing) :]
            return answer[: len(answer) - len(self.rest)]
        digits, ended, after = behind.partition(b";")
        if not ended:
            self.rest = found + behind
            return answer
        self.code = int(digits)
        self.hear(after)
        return answer

    def hear(self, noise: bytes) -> None:
        self.noise += noise[: MOST_NOISE_BYTES - len(self.noise)]

    def finish(self) -> None:
        """The stream is over: what was held back to see whether it becomes a mark was none."""
        if not self.began:
            self.hear(self.rest)

    @classmethod
    def of(cls, mark: str, stream: bytes) -> tuple[Answer, bytes]:
        """A whole stream at once, and what of it is the answer."""
        answer = cls(mark)
        found = answer.feed(stream)
        answer.finish()
        return answer, found


def overlap(data: bytes, mark: bytes) -> int:
    """How many bytes at the end of `data` may be the beginning of the mark."""
    longest = min(len(data), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if data.endswith(mark[:size])), 0)


def shown(noise: bytes) -> str:
    """Noise in few words, of one line."""
    text = " ".join(noise.decode("utf-8", "replace").split())
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def object_in(line: bytes) -> dict | None:
    """The JSON object that a line is; None for a line of somebody else."""
    try:
        found = json.loads(line) if line.lstrip().startswith(b"{") else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def object_with(key: str, answer: bytes) -> dict | None:
    """The last line of an answer that is a JSON object with this key: others write in between, if seldom."""
    found = (object_in(line) for line in reversed(answer.split(b"\n")))
    return next((one for one in found if one is not None and key in one), None)
