"""The server process: started from a plan, waited for by phases, its log read on the way."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher import canary, phases, processes
from launcher.console import Progress
from launcher.errors import Exit, LauncherError
from launcher.plan import Plan

POLL_S = 0.2


def start_server(plan: Plan, log: Path, record: Callable[[int], None], held: int | None) -> subprocess.Popen:
    """In a session of its own: Ctrl-C reaches only the launcher, and the whole group can be ended.

    `record` is given its pid before it begins; `held` is the descriptor that keeps its environment (venvs.hold).
    """
    if log.exists():
        log.replace(log.with_name(log.name + ".1"))
    with log.open("wb") as stream:
        return processes.start_recorded(
            plan.argv, record, stdout=stream, stderr=subprocess.STDOUT, env=plan.environment, cwd=plan.folder,
            pass_fds=() if held in (None, -1) else (held,),
        )  # fmt: skip


def wait_until_ready(server: subprocess.Popen, plan: Plan, log: Path, entered: Callable[[str], None]) -> None:
    """Follows the log until the server listens. `entered` is called with each phase's name."""
    reader = phases.LogReader()
    with log.open(errors="replace") as stream:
        while reader.phase != phases.LISTENING:
            entered(reader.phase)
            wait_for_phase(server, stream, reader, log)
    while not canary.is_healthy(plan.port):
        refuse_if_dead(server, reader, log)
        time.sleep(POLL_S)


def wait_for_phase(server: subprocess.Popen, stream, reader: phases.LogReader, log: Path) -> None:
    """Returns when the phase that is going on is over."""
    name, progress = reader.phase, Progress(reader.phase)
    try:
        while reader.phase == name:
            was_alive = server.poll() is None
            for line in complete_lines(stream):
                reader.feed(line)
            if reader.phase != name:
                break
            refuse_if_not_exl3(reader)
            if not was_alive:
                refuse_if_dead(server, reader, log)
            refuse_if_late(progress, reader, log)
            progress.tick()
            time.sleep(POLL_S)
        refuse_if_not_exl3(reader)
    except BaseException:
        progress.end("failed")
        raise
    progress.end("done")


def complete_lines(stream) -> Iterator[str]:
    """New whole lines of a file that is being written."""
    while True:
        position = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(position)
            return
        yield line


def refuse_if_not_exl3(reader: phases.LogReader) -> None:
    if reader.quantization not in (None, "exl3"):
        raise LauncherError(
            f"server: the engine runs the model with quantization={reader.quantization} where exl3 was expected, so "
            f"the plugin was not used; remove .venvs and start again.",
            Exit.SERVER,
        )


def refuse_if_dead(server: subprocess.Popen, reader: phases.LogReader, log: Path) -> None:
    code = server.poll()
    if code is None:
        return
    raise LauncherError(
        f"server: died in phase {reader.phase} ({how_it_ended(code)}): "
        f"{reader.reason().rstrip('.')}; the whole log is {log}.",
        Exit.SERVER,
    )


def how_it_ended(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def refuse_if_late(progress: Progress, reader: phases.LogReader, log: Path) -> None:
    if progress.elapsed_s > reader.limit_s:
        raise LauncherError(
            f"server: phase {reader.phase} is not over after {reader.limit_s} s, its last line was "
            f"{reader.last_line[:200]!r}; "
            f"the machine may be too busy or the server stuck, look at {log}.",
            Exit.SERVER,
        )


def stop_server(server: subprocess.Popen, grace_s: float = processes.STOP_GRACE_S) -> None:
    processes.stop_group(server.pid, grace_s)
