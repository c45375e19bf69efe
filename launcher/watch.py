"""Looks at what runs: units on their nodes, Ray's nodes, the server's log."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Container, Sequence

from launcher import framing, remote
from launcher.cluster_state import ClusterState, StartedUnit
from launcher.console import say
from launcher.errors import Exit, LauncherError
from launcher.remote import Node

LOG_TAIL = 15
# A node that does not answer is looked at again before it counts as lost.
LOST_AFTER_S = 20
WATCH_EVERY_S = 5


def state_of(started: StartedUnit) -> dict | None:
    """The unit's state in Docker's words; {} where there is nothing; None when nobody can tell."""
    result = remote.run(started.node, started.unit.state, timeout_s=15)
    if result.tells_nothing:
        return None
    return framing.object_with("Running", result.stdout) if result.ok else {}


def lost_gpus(state: ClusterState, dead: Container[int]) -> list[tuple[Node, str]]:
    """Ranks that run in a container without its GPU, as after a `systemctl daemon-reload`, with what was said there."""
    nodes = {started.node.rank: started.node for started in state.units if started.node.rank not in dead}
    asked = [node for node in nodes.values() if node.rank < len(state.list_gpus) and state.list_gpus[node.rank]]
    results = remote.on_all(asked, lambda node: remote.run(node, state.list_gpus[node.rank], timeout_s=15))
    return [(node, result.message) for node, result in zip(asked, results, strict=True)
            if not result.ok and not result.tells_nothing]  # fmt: skip


def log_of(started: StartedUnit) -> list[str]:
    result = remote.run(started.node, started.unit.logs, timeout_s=30)
    # Docker gives what a container wrote to its standard error on its own.
    return (result.stdout + result.stderr).decode(errors="replace").splitlines()


class Watcher:
    """Raises LauncherError when a unit has ended or its node is lost. Asks every few seconds at most."""

    def __init__(self) -> None:
        self.units: list[StartedUnit] = []
        self.last_look = 0.0
        self.silent_since: dict[int, float] = {}  # by rank

    def look(self) -> None:
        if time.monotonic() - self.last_look < WATCH_EVERY_S:
            return
        nodes = {started.node.rank: started.node for started in self.units}
        by_rank = remote.on_all(list(nodes.values()), self._states_on)
        self.last_look = time.monotonic()
        for states in by_rank:
            for started, state in states:
                self._judge(started, state)

    def _states_on(self, node: Node) -> list[tuple[StartedUnit, dict | None]]:
        return [(started, state_of(started)) for started in self.units if started.node.rank == node.rank]

    def _judge(self, started: StartedUnit, state: dict | None) -> None:
        rank = started.node.rank
        if state is None:
            since = self.silent_since.setdefault(rank, time.monotonic())
            if time.monotonic() - since > LOST_AFTER_S:
                raise LauncherError(
                    f"{started.label}: the node has not answered over ssh for {LOST_AFTER_S} s; see that it runs and "
                    f"that its link is up, then start again.",
                    Exit.SERVER,
                )
            return
        self.silent_since.pop(rank, None)
        if not state.get("Running"):
            died(started, state)


def died(started: StartedUnit, state: dict) -> None:
    lines = log_of(started)[-LOG_TAIL:]
    say("\n" + "\n".join(f"    {line}" for line in lines))
    how = f"ended with exit code {state['ExitCode']}" if "ExitCode" in state else "is gone"
    raise LauncherError(
        f"{started.label} {how}; its last lines are above, `logs {started.node.rank}` shows all of them.", Exit.SERVER
    )


def gpus_in_ray(node: Node, command: Sequence[str], addresses: Sequence[str]) -> int:
    """How many of the addresses have joined Ray with a GPU."""
    result = remote.run(node, command, timeout_s=60)
    if not result.ok:
        return 0
    try:
        joined = json.loads(result.stdout.decode().strip().splitlines()[-1])
    except (ValueError, IndexError):
        return 0
    return sum(1 for entry in joined if entry["alive"] and entry["gpus"] >= 1 and entry["address"] in addresses)


class LogFollower:
    """Lines of a unit's log on this machine, as they come."""

    def __init__(self, started: StartedUnit) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            list(started.unit.follow), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)

    def new_lines(self) -> list[str]:
        lines = []
        while not self.lines.empty():
            lines.append(self.lines.get())
        return lines

    def __enter__(self) -> LogFollower:
        return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait()
