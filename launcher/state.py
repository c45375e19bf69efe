"""The state file of a run: what runs, where, since when; and the lock that lets one start at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher import paths, processes
from launcher.errors import Exit, LauncherError


@dataclass(frozen=True)
class Process:
    """A process by what no other one has, on any machine that can read the state."""

    pid: int
    started: int  # see processes.start_time
    boot: str = ""  # of the machine; empty: of this one
    host: str = ""

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot in ("", processes.boot_id())

    @property
    def is_alive(self) -> bool:
        return self.is_of_this_boot and processes.is_same(self.pid, self.started)

    @property
    def is_elsewhere(self) -> bool:
        """On another machine, so that nobody here can tell whether it lives."""
        return not self.is_of_this_boot and self.host != socket.gethostname()

    @property
    def is_gone(self) -> bool:
        return not (self.is_alive or self.is_elsewhere)

    @property
    def has_remains(self) -> bool:
        """Whether anything of the process group that it led is still there."""
        is_free = processes.start_time(self.pid) in (None, self.started)
        return self.is_of_this_boot and is_free and bool(processes.group_members(self.pid))

    @property
    def fate(self) -> str:
        """Of one that is gone, for a sentence about what it did not end."""
        return f"its process {self.pid} is gone" if self.is_of_this_boot else f"{self.host} was restarted since"


@dataclass(frozen=True)
class State:
    phase: str
    port: int
    model: str
    log: str
    since: float  # wall clock, for the uptime
    launcher: Process
    server: Process | None = None
    ready: bool = False
    canary: str = ""  # the file of questions that the start asked

    @property
    def is_broken_off(self) -> bool:
        """A start or a soak whose launcher was killed before it could tidy up."""
        return not self.ready and self.launcher.is_gone

    @property
    def main_process(self) -> Process:
        return self.server or self.launcher

    @property
    def is_alive(self) -> bool:
        return self.main_process.is_alive


def this_process() -> Process:
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    return Process(pid, processes.start_time(pid) or 0, processes.boot_id(), socket.gethostname())


class StateFile:
    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "local.json"
        self.token_path = folder / "local.token"

    def write(self, state: State) -> None:
        """Whole or not at all: a reader never sees half a file."""
        with self.usable():
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(state), indent=1) + "\n")
            partial.replace(self.path)

    def usable(self):
        return paths.used(f"--run-dir {self.folder}:")

    def read(self) -> State | None:
        """The state as written, whoever of it is still alive; None if there is none or it is unreadable."""
        try:
            raw = json.loads(paths.text_of(self.path))
            raw["launcher"] = Process(**raw["launcher"])
            raw["server"] = Process(**raw["server"]) if raw["server"] else None
            return State(**raw)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def read_alive(self) -> State | None:
        state = self.read()
        return state if state and state.is_alive else None

    def remove(self) -> None:
        with self.usable():
            self.path.unlink(missing_ok=True)
            self.token_path.unlink(missing_ok=True)

    def write_token(self, token: str) -> None:
        """The token for the server's own routes, for the owner's eyes only."""
        self.token_path.unlink(missing_ok=True)
        descriptor = os.open(self.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(token)

    def read_token(self) -> str:
        """Empty where there is none; the server then refuses."""
        return self.token_path.read_text() if self.token_path.exists() else ""

    @contextmanager
    def lock(self):
        """Held from the checks of a start until it is ready or undone. Dies with its process."""
        with self.usable():
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / "local.lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LauncherError(self.busy(), Exit.BUSY) from None
            yield

    def busy(self) -> str:
        state = self.read_alive()
        where = f" (pid {state.launcher.pid}, phase {state.phase})" if state else ""
        return (
            f"Another start is under way{where}, or a soak; wait for it, end a start with `./start-local.sh stop`, or "
            f"press Ctrl-C where it runs."
        )
