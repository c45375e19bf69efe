"""What a check is: a name, a function over the facts of all nodes, and findings of what was seen and what to do."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.discovery import Fabric
from launcher.errors import LauncherError
from launcher.facts import NodeFacts
from launcher.remote import Node

if TYPE_CHECKING:
    from launcher.weights.contents import Contents

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"

GIB = 1 << 30
# A limit on the clocks costs a few per cent and is often meant; half the clock is a fault.
EQUAL_CLOCKS, FAULTY_CLOCKS = 0.95, 0.5
CLOCKS_FIX = "sudo nvidia-smi --reset-gpu-clocks on that node; if that changes nothing, unplug it for a minute"


@dataclass(frozen=True)
class Finding:
    check: str
    node: int | None  # rank; None: about all nodes
    level: str  # PASS, WARN or FAIL
    seen: str
    fix: str = ""  # empty with PASS


@dataclass(frozen=True)
class Ours:
    """What runs already and belongs to this cluster: a restart is checked as if it were stopped."""

    containers: frozenset[str] = frozenset()  # names
    pids: Mapping[int, frozenset[int]] = field(default_factory=dict)  # rank -> process ids


@dataclass(frozen=True)
class Context:
    config: Mapping
    nodes: Sequence[Node]  # in rank order, as are the facts and the fabrics
    facts: Sequence[NodeFacts]
    fabrics: Sequence[Fabric]
    ports: Mapping[int, Sequence[int]] = field(default_factory=dict)  # rank -> ports that its processes will open
    previous: Mapping | None = None  # record of the last start, see discovery.record_of
    ours: Ours = Ours()
    contents: Contents | LauncherError | None = None  # of the checkpoint on rank 0, by its headers
    recipe: str = ""  # digest of what this checkout would put into an image; empty: not compared

    @property
    def is_native(self) -> bool:
        return self.config["RUNTIME"] == "native"

    def ssh(self, rank: int, program: str = "ssh") -> str:
        """How the user types his way to a node."""
        node = self.nodes[rank]
        words = [program, *(["-p", str(node.port)] if node.port != 22 else [])]
        return shlex.join([*words, *(["-i", node.key] if node.key else []), node.login])

    def container_ids_of_ours(self, node: NodeFacts) -> set[str]:
        return {one.id for one in node.containers or () if one.name in self.ours.containers}

    def is_ours(self, node: NodeFacts, pids: Iterable[int | None], container: str) -> bool:
        """Whether one of the processes (itself, its parents) or the container is of what runs already."""
        return bool(self.ours.pids.get(node.rank, frozenset()).intersection(pids)
                    or container in self.container_ids_of_ours(node))  # fmt: skip

    def bytes_of_ours(self, node: NodeFacts) -> int:
        """What comes free when our own server stops, as far as can be told."""
        return sum(one.used_bytes or 0 for one in node.gpu_processes or ()
                   if self.is_ours(node, [one.pid], one.container))  # fmt: skip

    def ours_runs_on(self, node: NodeFacts) -> bool:
        return bool(self.container_ids_of_ours(node) or self.ours.pids.get(node.rank))


@dataclass(frozen=True)
class Verdict:
    """A finding without the names, which the check's frame adds."""

    level: str
    seen: str
    fix: str = ""
    node: int | None = None  # for checks over all nodes


def passed(seen: str, node: int | None = None) -> Verdict:
    return Verdict(PASS, seen, "", node)


def warned(seen: str, fix: str, node: int | None = None) -> Verdict:
    return Verdict(WARN, seen, fix, node)


def failed(seen: str, fix: str, node: int | None = None) -> Verdict:
    return Verdict(FAIL, seen, fix, node)


Check = Callable[[Context], list[Finding]]
CHECKS: dict[str, Check] = {}  # in the order in which they are reported

NOT_NEEDED = "not needed with RUNTIME=native"
NOT_REACHED = "not looked at: node not reached"
NOT_PROBED = "not looked at: the probe did not run"
READ_ERRORS_FIX = "see that the user who logs in may read this, and that the command answers when typed on the node"


def each_node(name: str, *topics: str, runtime: str = ""):
    """Registers function(context, node) -> Verdict(s), called for every node that was looked at.

    With a runtime, the check applies to that one only.
    """

    def function_over_all(function):
        def over_nodes(context: Context, nodes: Sequence[NodeFacts]) -> Iterable[Verdict]:
            for node in nodes:
                for verdict in as_list(function(context, node)):
                    yield Verdict(verdict.level, verdict.seen, verdict.fix, node.rank)

        over_all(name, *topics, runtime=runtime)(functools.wraps(function)(over_nodes))
        return function

    return function_over_all


def over_all(name: str, *topics: str, runtime: str = ""):
    """Registers function(context, nodes) -> Verdict(s), called with the nodes whose topics are known."""

    def register(function):
        @functools.wraps(function)
        def check(context: Context) -> list[Finding]:
            if runtime and context.config["RUNTIME"] != runtime:
                return [Finding(name, None, PASS, f"not needed with RUNTIME={context.config['RUNTIME']}")]
            known, verdicts = sort_out(context, topics)
            verdicts += as_list(function(context, known)) if known else []
            verdicts.sort(key=lambda verdict: -1 if verdict.node is None else verdict.node)
            return [Finding(name, verdict.node, verdict.level, verdict.seen, verdict.fix) for verdict in verdicts]

        CHECKS[name] = check
        return function

    return register


def as_list(verdicts: Verdict | Iterable[Verdict]) -> list[Verdict]:
    return [verdicts] if isinstance(verdicts, Verdict) else list(verdicts)


def sort_out(context: Context, topics: Sequence[str]) -> tuple[list[NodeFacts], list[Verdict]]:
    """The nodes whose topics are known, and what is to be said of the others."""
    known, verdicts = [], []
    for node in context.facts:
        unread = [topic for topic in topics if topic in node.errors]
        docker = docker_problem(node) if set(topics) & {"image", "containers"} else ""
        if node.unreached:
            verdicts.append(warned(NOT_REACHED, "see ssh-access", node.rank))
        elif node.unprobed:
            verdicts.append(warned(NOT_PROBED, "see python", node.rank))
        elif docker:
            verdicts.append(warned(f"not looked at: {docker}", "see docker", node.rank))
        elif unread:
            seen = "; ".join(f"{topic} could not be read: {node.errors[topic]}" for topic in unread)
            verdicts.append(failed(seen, READ_ERRORS_FIX, node.rank))
        else:
            known.append(node)
    return known, verdicts


def docker_problem(node: NodeFacts) -> str:
    if node.docker is None:
        return ""
    if not node.docker.program:
        return "Docker is not installed"
    return "Docker does not answer" if node.docker.error else ""


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
