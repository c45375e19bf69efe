"""Runs the named checks over the facts of all nodes: all run, all report; a name is also how to skip one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

# Each module adds its checks to CHECKS; the order here is the order of the report.
from launcher import host_checks  # isort: skip
from launcher import fabric_checks  # isort: skip
from launcher import content_checks  # isort: skip
from launcher import weights_checks  # isort: skip
from launcher import memory_plan  # isort: skip
from launcher import cluster_plan, discovery, facts, paths, refusals
from launcher.cluster_state import files_of
from launcher.commands import container_name
from launcher.errors import Exit, LauncherError
from launcher.facts import NodeFacts
from launcher.findings import CHECKS, FAIL, NOT_PROBED, NOT_REACHED, PASS, WARN, Context, Finding, Ours
from launcher.gpu_ways import refused as refused_ways
from launcher.remote import Node
from launcher.running_checks import RUNNING_CHECKS
from launcher.weights.contents import Contents

__all__ = ["CHECKS", "FAIL", "PASS", "WARN", "CheckReport", "Context", "Finding", "Ours", "check_skip", "context",
           "describe", "failed", "image_id", "ports_of", "request", "run_checks"]  # fmt: skip

MODULES = (host_checks, fabric_checks, content_checks, weights_checks, memory_plan)


# What the checks look at


def ports_of(config) -> dict[int, list[int]]:
    """rank -> every port that must be free on that node."""
    numbers: dict[int, set[int]] = {rank: set() for rank in range(config.topology.nodes)}
    for port in cluster_plan.ports(config):
        if port.number:
            first, _, last = port.number.partition("-")
            numbers[port.rank].update(range(int(first), int(last or first) + 1))
    return {rank: sorted(own) for rank, own in numbers.items()}


def request(config) -> dict:
    """What the probe is asked, on every node."""
    return facts.request_for(config, {port for own in ports_of(config).values() for port in own})


def context(
    config,
    nodes: Sequence[Node],
    found: Sequence[NodeFacts],
    previous: Mapping | None = None,
    units: Iterable[tuple[int, Mapping | None]] = (),
    contents: Contents | LauncherError | None = None,
    recipe: str = "",
) -> Context:
    """Everything that the checks see. `units`: rank and state of what the launcher has started, as far as known."""
    running = [(rank, state) for rank, state in units if state and state.get("Running")]
    names = frozenset(container_name(config, rank) for rank, _ in running if config["RUNTIME"] == "docker")
    pids: dict[int, set[int]] = {}
    for rank, state in running:
        if state.get("Pid"):
            pids.setdefault(rank, set()).add(int(state["Pid"]))
    ours = Ours(names, {rank: frozenset(own) for rank, own in pids.items()})
    links = discovery.find_links(config, found)
    return Context(config, nodes, found, links, ports_of(config), previous, ours, contents, recipe)


def image_id(context: Context) -> str:
    """Of the image on rank 0; empty where none is used or it is not there."""
    image = context.facts[0].image
    return image.id if image else ""


# Before anything is asked


def refuse_settings(config) -> None:
    """What is wrong by the settings alone, all of it: for `plan`, `check` and a start alike."""
    problems = refusals.refusals(config)
    folder = files_of(config).folder
    if why := paths.why_no_folder(folder):
        problems.append(refusals.located(config, f"RUN_DIR is {folder}: {why}; set it to a folder of your own."))
    try:
        check_skip(config["SKIP_CHECKS"])
    except LauncherError as error:
        problems.append(refusals.located(config, str(error)))
    if problems:
        raise LauncherError("\n".join(problems))
    cluster_plan.make(config)


# What the facts say


def gpu_ways(context: Context) -> list[str]:
    """By rank: how its containers get the GPU. Raises LauncherError where no way works, or none could be tried."""
    if context.config["RUNTIME"] != "docker":
        return []
    return [way_of(node, str(context.config["IMAGE"])) for node in context.facts]


def way_of(node: NodeFacts, image: str) -> str:
    if node.gpu_access and node.gpu_access.way:
        return node.gpu_access.way
    where = f"node {node.rank} ({node.address})"
    if node.gpu_access:
        seen, fix = refused_ways(node.gpu_access.tried)
        raise LauncherError(f"{where}: no container gets the GPU ({seen}); {fix}.", Exit.SETUP)
    trouble = node.unreached or node.unprobed or node.errors.get("gpu_access") or f"image {image} is not there"
    raise LauncherError(f"{where}: it is not known how containers get the GPU there: {trouble}.", Exit.SETUP)


# Running them


def check_skip(skip: Iterable[str]) -> None:
    """A misspelt name would leave the check in, or tell nobody that it never was one."""
    known = (*CHECKS, *RUNNING_CHECKS)
    for name in skip:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the checks are {', '.join(known)}."
            raise LauncherError(f"SKIP_CHECKS: there is no check {name!r}; {hint}", Exit.USAGE)


def run_checks(context: Context, skip: Sequence[str] = ()) -> list[Finding]:
    check_skip(skip)
    findings = []
    for name, check in CHECKS.items():
        if name in skip:
            findings.append(Finding(name, None, WARN, "skipped", f"take {name} out of SKIP_CHECKS"))
        else:
            findings += guarded(name, check, context)
    return findings


def guarded(name: str, check, context: Context) -> list[Finding]:
    try:
        return check(context)
    except Exception as error:  # a check that breaks has not passed, and must not hide the others
        seen = f"the check itself broke: {type(error).__name__}: {error}"
        return [Finding(name, None, FAIL, seen, f"report this; until then SKIP_CHECKS={name}")]


def failed(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == FAIL]


# Telling


@dataclass(frozen=True)
class CheckReport:
    """What `check` found on every node, and what only a start can look at."""

    kind: ClassVar[str] = "check"
    findings: Sequence[Finding]

    @property
    def code(self) -> Exit:
        return Exit.REFUSED if failed(self.findings) else Exit.OK

    @property
    def problem(self) -> str:
        names = ", ".join(sorted({finding.check for finding in failed(self.findings)}))
        return f"{names} failed; `fix` of each finding says what to do." if names else ""

    def body(self) -> Mapping[str, object]:
        levels = [finding.level for finding in self.findings]
        return {
            "counts": {level: levels.count(level) for level in (PASS, WARN, FAIL)},
            "findings": [asdict(finding) | {"fix": finding.fix or None} for finding in self.findings],
            "at_start": [{"check": name, "looks_at": what} for name, what in RUNNING_CHECKS.items()],
        }

    def text(self) -> str:
        later = "\n".join(f"      {name:<18} {what}" for name, what in RUNNING_CHECKS.items())
        return f"{describe(self.findings)}\nA start checks more, once there is something to look at:\n{later}"


def describe(findings: Sequence[Finding]) -> str:
    """A line for each finding with its fix below. What all nodes pass alike is one line, and so is a silent node."""
    silent = [finding for finding in findings if finding.seen in (NOT_REACHED, NOT_PROBED)]
    lines = []
    for name in dict.fromkeys(finding.check for finding in findings):
        of_check = [finding for finding in findings if finding.check == name and finding not in silent]
        if len(of_check) > 1 and {(finding.level, finding.seen) for finding in of_check} == {(PASS, of_check[0].seen)}:
            of_check = [replace(of_check[0], node=None)]
        for finding in of_check:
            where = "" if finding.node is None else f"node {finding.node}: "
            lines.append(f"{finding.level}  {name:<18} {where}{finding.seen}")
            if finding.fix:
                lines.append(f"{'':<25}-> {finding.fix}")
    for node, seen in dict.fromkeys((finding.node, finding.seen) for finding in silent):
        count = sum((finding.node, finding.seen) == (node, seen) for finding in silent)
        lines.append(f"{WARN}  {count} checks of node {node} {seen}")
    return "\n".join(lines)
