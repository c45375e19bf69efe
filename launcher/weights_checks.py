"""Checks of the weights: whole and verified on the first node, and the same bytes on every other one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher import console
from launcher.facts import Checkpoint, NodeFacts
from launcher.findings import Context, Verdict, failed, gib, over_all, passed, warned

NAME = "weights"
CHECKPOINTS = {"model": "MODEL_DIR", "draft": "DRAFT_DIR"}


@over_all(NAME, "paths")
def check_weights(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    for name in checkpoints_of(context.config):
        for node in nodes:
            problem = problem_of(context, node, name)
            if problem:
                yield failed(problem, fix_of(context, node, name), node.rank)
                continue
            there = node.paths[name].checkpoint
            if there.record and there.record.extra:
                yield warned(f"{node.paths[name].path}: {there.record.extra[0]} is not one of the verified files",
                             "move it away unless you have put it there", node.rank)  # fmt: skip
            yield passed(f"{node.paths[name].path}: {described(there)}", node.rank)


@over_all("rsync", "host", "paths")
def check_rsync(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    """Only what has to be copied needs it."""
    filled = workers_to_fill(context)
    for node in nodes:
        if node.host.rsync:
            yield passed("rsync is installed", node.rank)
        elif filled and node.rank in (0, *filled):
            yield failed("rsync is not installed, and weights have to be copied",
                         "sudo apt-get install rsync on that node", node.rank)  # fmt: skip
        else:
            yield warned("rsync is not installed", "sudo apt-get install rsync on that node, before the weights change",
                         node.rank)  # fmt: skip


def checkpoints_of(config) -> list[str]:
    return [name for name in CHECKPOINTS if name == "model" or config["SPEC_METHOD"] == "dflash"]


def workers_to_fill(context: Context) -> list[int]:
    """Ranks that a sync would help: the first node's weights are right, theirs are not."""
    names = checkpoints_of(context.config)
    known = [node for node in context.facts if node.looked_at and node.paths is not None]
    if not known or known[0].rank != 0 or any(problem_of(context, known[0], name) for name in names):
        return []
    return [node.rank for node in known[1:] if any(problem_of(context, node, name) for name in names)]


def bytes_to_fill(context: Context) -> int:
    """At most so much is copied to one node."""
    there = [context.facts[0].checkpoint(name) for name in checkpoints_of(context.config)]
    return sum(one.total_bytes for one in there if one)


def problem_of(context: Context, node: NodeFacts, name: str) -> str:
    """Why the node's checkpoint cannot be served; empty if it can."""
    path = node.paths.get(name)
    if path is None:
        return f"{CHECKPOINTS[name]} is empty"
    if path.checkpoint is None:
        return f"{path.path}: there is no such folder"
    problem = path.checkpoint.lack or (
        unverified(path.checkpoint) if node.rank == 0 else difference(context, path.checkpoint, name)
    )
    return problem and f"{path.path}: {problem}"


def unverified(there: Checkpoint) -> str:
    """A small checkpoint needs no record: it is hashed whenever it is looked at."""
    if there.record is None:
        return "" if there.is_small else "nobody has verified it"
    if there.record.error:
        return f"its record .exl3-verified.json cannot be read ({there.record.error})"
    changed = there.record.changed
    return changed and f"{len(changed)} files are not as they were when they were verified, first {changed[0]}"


def difference(context: Context, there: Checkpoint, name: str) -> str:
    """What is other than on the first node; without that, only what the node itself can tell."""
    first = context.facts[0].checkpoint(name)
    if first is None or first.lack:
        return unverified(there)
    differs = other_file(there, first)
    if differs or first.is_small:
        return differs
    problem = unverified(there)
    if problem or first.record is None or first.record.digest == there.record.digest:
        return problem
    return f"other weights ({of_record(there)}) than on node 0 ({of_record(first)})"


def of_record(there: Checkpoint) -> str:
    return f"{there.record.pack} at {there.record.revision[:12]}"


def other_file(one: Checkpoint, other: Checkpoint) -> str:
    for name in sorted({*one.hashes, *other.hashes}):
        if one.hashes.get(name) != other.hashes.get(name):
            return f"{name} is another one than on node 0"
    here, there = one.shard_sizes, other.shard_sizes
    wrong = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(there)} shards have another size, first {first}: {here.get(first, 'missing')} "
        f"instead of {there.get(first, 'missing')} bytes"
    )


def described(there: Checkpoint) -> str:
    sizes = there.shard_sizes
    how = f"verified, {of_record(there)}" if there.record else "hashed just now"
    return f"{len(sizes)} shard{'s' if len(sizes) > 1 else ''}, {gib(sum(sizes.values()))}, {how}"


def fix_of(context: Context, node: NodeFacts, name: str) -> str:
    path = node.paths.get(name)
    if path is None:
        return f"set {CHECKPOINTS[name]} to the folder of the weights, the same on every node"
    if node.rank:
        good = context.facts[0].paths is not None and not problem_of(context, context.facts[0], name)
        when = "" if good else ", after node 0 has them"
        return f"{console.program()} sync copies from node 0 and verifies there{when}; a start does it, too"
    if path.checkpoint and not path.checkpoint.lack:
        return "./download.sh verify (with --own for a checkpoint of your own)"
    return f"./download.sh, or point {CHECKPOINTS[name]} at the folder that holds them"
