"""Measures each link between node 0 and the others by a short ib_write_bw, before anything is started.

The server runs on node 0, the client on the other node; both end by themselves. What comes out is a fact of the other
node, and the check `link-bandwidth` judges it.
"""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher import processes, remote
from launcher.discovery import Fabric, Rail, is_usable
from launcher.facts import LinkRun, NodeFacts
from launcher.findings import NOT_NEEDED, Context, Verdict, passed, warned
from launcher.remote import Node

CHECK = "link-bandwidth"
SECONDS = 2
# Of one side, on its own node: whatever happens to the other one or to ssh, nothing of it stays longer.
LIMIT_S = 10
LISTENS_WITHIN_S = 3
POLL_S = 0.05
USUAL_PORT = 18515  # perftest's own

# #bytes, #iterations, BW peak, BW average, MsgRate
REPORT = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)


@dataclass(frozen=True)
class End:
    """One side of a link."""

    node: Node
    program: str
    rail: Rail
    gid_index: int

    def argv(self, port: int, *server: str) -> list[str]:
        """The client is told the server's address."""
        return [
            "timeout", "-k", "1", str(LIMIT_S), self.program,
            "-d", self.rail.port.device, "-i", str(self.rail.port.port), "-x", str(self.gid_index),
            "-p", str(port), "-D", str(SECONDS), "-F", "--report_gbits", *server,
        ]  # fmt: skip


@dataclass(frozen=True)
class Pairing:
    here: End  # on node 0
    there: End

    @property
    def ends(self) -> set[tuple[int, str]]:
        return {(end.node.rank, end.rail.device) for end in (self.here, self.there)}


# What is to be measured. Pure.


def obstacle(context: Context, node: NodeFacts) -> Verdict | None:
    """Why the links to a node are not measured; None if they can be."""
    head = context.facts[0]
    if context.is_native:
        return passed(NOT_NEEDED)
    if any(runs_a_rank(context, one) for one in (head, node)):
        return passed("not measured while the cluster runs, which it would disturb")
    without = [one.rank for one in (head, node) if one.host is None or not one.host.ib_write_bw]
    if without:
        where = " and ".join(f"node {rank}" for rank in without)
        return warned(
            f"not measured: no ib_write_bw on {where}",
            f"sudo apt-get install perftest there, then every start measures; without it, SKIP_CHECKS={CHECK}",
        )
    if not pairings(context, node.rank):
        return passed("not measured: no rail shares a network with one of node 0")
    return None


def runs_a_rank(context: Context, node: NodeFacts) -> bool:
    """Also one of another topology of ours, or one that a lost state file has forgotten."""
    ours = re.compile(re.escape(str(context.config["CONTAINER_NAME_PREFIX"])) + r"-tp\d+-rank\d+")
    return context.ours_runs_on(node) or any(ours.fullmatch(one.name) for one in node.containers or ())


def pairings(context: Context, rank: int) -> list[Pairing]:
    return [
        Pairing(end_of(context, 0, here), end_of(context, rank, there))
        for here, there in rail_pairs(context.fabrics[0], context.fabrics[rank])
    ]


def rail_pairs(here: Fabric, there: Fabric) -> list[tuple[Rail, Rail]]:
    """Rails that reach each other, by their network; in the order of the first node's."""
    left, pairs = measurable(there), []
    for rail in measurable(here):
        other = next((one for one in left if one.network == rail.network), None)
        if other:
            left.remove(other)
            pairs.append((rail, other))
    return pairs


def measurable(fabric: Fabric) -> list[Rail]:
    return [rail for rail in fabric.rails if is_usable(rail) and fabric.index_of(rail) is not None]


def end_of(context: Context, rank: int, rail: Rail) -> End:
    host = context.facts[rank].host
    return End(context.nodes[rank], host.ib_write_bw if host else "", rail, context.fabrics[rank].index_of(rail))


def rounds(wanted: Sequence[Pairing]) -> list[list[Pairing]]:
    """At once runs what shares no device: both rails of a node, but not one rail of node 0 with two nodes."""
    made: list[list[Pairing]] = []
    for pairing in wanted:
        free = next((one for one in made if not any(pairing.ends & other.ends for other in one)), None)
        if free is None:
            made.append([pairing])
        else:
            free.append(pairing)
    return made


# Measuring


def with_runs(context: Context) -> Context:
    """The same context with the measured links as facts of the other nodes."""
    wanted = [pairing for node in context.facts[1:] if obstacle(context, node) is None
              for pairing in pairings(context, node.rank)]  # fmt: skip
    runs: dict[int, list[LinkRun]] = {}
    for one_round in rounds(wanted):
        for pairing, run in zip(one_round, remote.on_all(one_round, measure), strict=True):
            runs.setdefault(pairing.there.node.rank, []).append(run)
    return replace(context, facts=[
        replace(node, link_runs=tuple(runs[node.rank])) if node.rank in runs else node for node in context.facts
    ])  # fmt: skip


def measure(pairing: Pairing) -> LinkRun:
    here, there = pairing.here, pairing.there
    run = LinkRun(there.rail.device, here.rail.device)
    port = free_port()
    try:
        with remote.beside(here.argv(port)) as server:
            if not listens(server, port):
                return replace(run, problem=f"node 0: {remote.said_by(server)}")
            result = remote.run(there.node, there.argv(port, here.rail.address), timeout_s=LIMIT_S + 5)
    except OSError as error:
        return replace(run, problem=f"node 0: {error}")
    gbps = read_gbps(result.stdout.decode(errors="replace"))
    if not result.ok or gbps is None:
        return replace(run, problem=f"node {there.node.rank}: {result.message}")
    return replace(run, gbps=gbps)


def by_hand(context: Context, rank: int, device: str) -> str:
    """What to type to see more of a measurement that failed."""
    one = next(pairing for pairing in pairings(context, rank) if pairing.there.rail.device == device)
    here, there = one.here.argv(USUAL_PORT), one.there.argv(USUAL_PORT, one.here.rail.address)
    ours = here.index(one.here.program)
    return f"type `{shlex.join(here[ours:])}` on node 0, then `{shlex.join(there[ours:])}` on node {rank}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def listens(server, port: int) -> bool:
    """Waits for it; no when the server ended before, or takes too long."""
    deadline = time.monotonic() + LISTENS_WITHIN_S
    while not processes.listening_inodes(port):
        if server.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def read_gbps(text: str) -> float | None:
    """The average that ib_write_bw reports, None where it reports none in Gb/s."""
    found = REPORT.findall(text)
    return float(found[-1]) if found and "BW average[Gb/sec]" in text else None
