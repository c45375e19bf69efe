"""An engine and its ranks as one group of processes: whatever ends the engine or its runner ends all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path


def start(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    """`stdout` has what all of the group say, as text."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        cwd=folder, env=environment, start_new_session=True,
    )  # fmt: skip
    process.others = threading.Thread(target=_end_others, args=(process,), daemon=True)
    process.others.start()
    return process


def kill(process: subprocess.Popen) -> None:
    """Of a process that `collect` has not seen yet, so that its number is nobody else's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_others(process: subprocess.Popen) -> None:
    """Ranks that outlive their engine would hold its output open, and the GPU's memory."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    kill(process)


def collect(process: subprocess.Popen) -> int:
    """The exit code, after all output was read."""
    process.others.join()
    process.stdin.close()
    process.stdout.close()
    return process.wait()


def end_with_runner() -> None:
    """In the engine: the runner holds the other end of stdin, which closes however the runner ends."""

    def watch() -> None:
        # Not through sys.stdin, whose lock a forked rank would inherit.
        os.read(0, 1)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
