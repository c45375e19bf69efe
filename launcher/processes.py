"""Processes seen through /proc: who they are, whether they still are the same, how to end them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.settings import HOST

PROC = Path("/proc")
STOP_GRACE_S = 20
TERMINATE_GRACE_S = 5
# Waits for a line, and ends without one.
GATE = 'read -r go && exec "$@" < /dev/null'


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (the name before it may hold spaces), None if it is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; with the pid it names a process for good."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def is_same(pid: int, started: int) -> bool:
    """Whether the process that had this pid then still runs; a reused pid has another start time."""
    return start_time(pid) == started


def boot_id() -> str:
    """Of this machine's run since it was switched on: pids of another one mean nothing."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_recorded(argv: Sequence[str], record: Callable[[int], None], **how) -> subprocess.Popen:
    """The command, in a session of its own. It begins once `record(pid)` is over, and never if we die before.

    So whatever kills us, what runs is on record.
    """
    child = subprocess.Popen(["/bin/sh", "-c", GATE, "sh", *argv], stdin=subprocess.PIPE, start_new_session=True, **how)
    try:
        record(child.pid)
        os.write(child.stdin.fileno(), b"\n")
    except BaseException:
        child.kill()
        child.wait()
        raise
    finally:
        child.stdin.close()
    return child


def leading(endings: Sequence[bytes]) -> list[int]:
    """Living leaders of a session whose command line in /proc ends so (remote.ending), by whatever interpreter.

    So the launcher starts its own helpers (remote.py); what the user typed, or what a helper left behind, leads none.
    """
    found = []
    for entry in PROC.iterdir():
        fields = stat_fields(int(entry.name)) if entry.name.isdigit() else None
        if fields and fields[0] != "Z" and fields[3] == entry.name and command_line(entry).endswith(tuple(endings)):
            found.append(int(entry.name))
    return found


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    members = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            fields = stat_fields(int(entry.name))
            if fields and fields[0] != "Z" and int(fields[2]) == group:
                members.append(int(entry.name))
    return members


def stop_group(group: int, grace_s: float = STOP_GRACE_S) -> None:
    """Asks the group's leader to end as Ctrl-C does, then makes sure that nobody of the group is left."""
    send(group, signal.SIGINT)
    has_leader = start_time(group) is not None
    if not wait_until_gone(group, grace_s if has_leader else 0):
        send_group(group, signal.SIGTERM)
        if not wait_until_gone(group, TERMINATE_GRACE_S):
            send_group(group, signal.SIGKILL)
            wait_until_gone(group, 5)


def wait_until_gone(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while group_members(group):
        reap(group)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    reap(group)
    return True


def reap(pid: int) -> None:
    """Collects a child that has ended, so that it does not stay as a zombie; nothing if it is no child of ours."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def send_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server does: connections that are merely winding down do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def port_owner(port: int) -> str | None:
    """'name (pid 12)' of the process that listens on a port, None where /proc does not show it to us."""
    inodes = listening_inodes(port)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and inodes and inodes & socket_inodes(entry):
            return f"{(entry / 'comm').read_text().strip()} (pid {entry.name})"
    return None


def listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, rows):
            is_listening = fields[3] == "0A"
            if is_listening and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def socket_inodes(process: Path) -> set[str]:
    try:
        targets = [os.readlink(entry) for entry in (process / "fd").iterdir()]
    except OSError:
        return set()
    return {target[8:-1] for target in targets if target.startswith("socket:[")}
