"""The one exception a user sees: a sentence and an exit code."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the launcher; docs/local.md lists them."""

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


class LauncherError(Exception):
    """Where, what was seen, what was needed, what to do: in one sentence for the user."""

    def __init__(self, message: str, code: Exit = Exit.REFUSED):
        super().__init__(message)
        self.code = code
