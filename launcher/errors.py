"""The one exception a user sees: a sentence and an exit code; and what each code means."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class Exit(IntEnum):
    """Exit codes of every start script."""

    OK = 0
    NOT_RUNNING = 1  # `status` and `logs` when there is nothing
    USAGE = 2
    REFUSED = 3  # a check failed before anything was started
    SETUP = 4  # the environment could not be made
    SERVER = 5  # the server died or did not get ready in time
    WRONG_ANSWER = 6  # the server runs, but the canary was not answered correctly
    BUSY = 7  # already running or starting
    STARTING = 8  # `status` while a start is under way
    FAULT = 9  # of the launcher itself
    INTERRUPTED = 130


# `--help` and the tables of docs/local.md and docs/cluster.md have these words.
MEANINGS: Mapping[Exit, str] = MappingProxyType({
    Exit.OK: "done; `status`: ready and answering",
    Exit.NOT_RUNNING: "`status`, `logs`, `shell`, `canary`, `cache reset`, `soak --running`: nothing runs; `soak`: it "
    "found something",
    Exit.USAGE: "a setting or an argument is wrong",
    Exit.REFUSED: "a check or the plan was refused; nothing was started or stopped; `soak`: an engine gave no answer",
    Exit.SETUP: "something could not be set up: Python packages, an image, a file or weights on a node",
    Exit.SERVER: "the server died, was lost, failed a check while it started, or was not ready in time; `status`: it "
    "does not answer, is broken or stuck, or a start was broken off; `canary`, `cache reset`: it refused",
    Exit.WRONG_ANSWER: "the model answered wrongly, at a start or to `canary`",
    Exit.BUSY: "already running, or another start, sync or soak is under way; `cache reset`: no pause between requests",
    Exit.STARTING: "`status`, `canary`, `cache reset`: a start, a stop or a soak is under way",
    Exit.FAULT: "a fault of the launcher itself; the message names a log for an issue",
    Exit.INTERRUPTED: "interrupted",
})  # fmt: skip


class LauncherError(Exception):
    """Where, what was seen, what was needed, what to do: in one sentence for the user."""

    def __init__(self, message: str, code: Exit = Exit.REFUSED):
        super().__init__(message)
        self.code = code
