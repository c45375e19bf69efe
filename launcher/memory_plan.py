"""What each node's memory is for: named terms from the checkpoint's headers and the settings, before a load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher import refusals
from launcher.errors import LauncherError
from launcher.facts import NodeFacts
from launcher.findings import GIB, Context, Verdict, each_node, failed, gib, passed, warned
from launcher.weights import contents
from launcher.weights.contents import Contents
from launcher.weights.meter import size

# Activations of one step and CUDA graphs; owners of the older recipe report 3.9 GiB, not measured with this one.
WORKING_BYTES = 4 * GIB
NAME = "memory-plan"
LEAST_CACHE_GIB = 0.25  # of KV_CACHE_GIB


@dataclass(frozen=True)
class Term:
    name: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.bytes / GIB:.1f}"


def contents_of(config) -> Contents | LauncherError | None:
    """Of the checkpoint on this machine. None: there is none, or it is decoded as it is loaded (RUNTIME=native)."""
    folder = Path(str(config["MODEL_DIR"])).expanduser()
    if config["RUNTIME"] == "native" or not config["MODEL_DIR"] or not os.path.isdir(folder):
        return None
    try:
        return contents.of(folder)
    except LauncherError as error:
        return error
    except OSError as error:
        return LauncherError(f"MODEL_DIR {folder}: {error.filename or 'it'} could not be read ({error.strerror})")


def weights_bytes(config, found: Contents) -> int:
    """On the fullest rank."""
    return found.bytes_of_rank(
        config.topology.nodes,
        expert_parallel=bool(config["EXPERT_PARALLEL"]),
        mtp=config["SPEC_METHOD"] == "mtp",
        vision=bool(config["VISION"]),
    )


def terms(config, found: Contents, draft_bytes: int) -> list[Term]:
    """Of one node. The draft counts whole, though the ranks may share it."""
    draft = [Term("draft model", draft_bytes)] if config["SPEC_METHOD"] == "dflash" else []
    return [
        Term("weights", weights_bytes(config, found)),
        *draft,
        Term("KV cache", round(float(config["KV_CACHE_GIB"] or 0) * GIB)),
        Term("activations and graphs", WORKING_BYTES),
        Term("left free", round(float(config["MEMORY_FLOOR_GIB"]) * GIB)),
    ]


def notes(config) -> Iterator[str]:
    """For the printed plan, where this machine has the checkpoint. Raises what `check` says of a damaged one."""
    found = contents_of(config)
    if isinstance(found, LauncherError) and NAME not in config["SKIP_CHECKS"]:
        raise LauncherError(refusals.located(config, f"MODEL_DIR: {found}"))
    if isinstance(found, Contents):
        yield f"the checkpoint: {found.describe()}."
        yield f"its weights take {size(weights_bytes(config, found))} on the fullest node, by the headers."


@each_node(NAME, "memory")
def check_memory_plan(context: Context, node: NodeFacts) -> Verdict:
    config, found = context.config, context.contents
    if found is None:
        return passed("not computed: the headers are of a checkpoint on node 0, for RUNTIME=docker")
    if isinstance(found, LauncherError):
        return failed(str(found), "./download.sh verify --full names what is damaged, ./download.sh fetches it again")
    draft = context.facts[0].checkpoint("draft")
    wanted = terms(config, found, draft.total_bytes if draft else 0)
    needed, free = sum(term.bytes for term in wanted), node.memory.available_bytes + context.bytes_of_ours(node)
    seen = f"{' + '.join(map(str, wanted))} = {gib(needed)} of {gib(free)}"
    if needed <= free:
        return passed(seen)
    if context.ours_runs_on(node):
        return warned(f"{seen}; what our own running server holds cannot be told", "nothing while it runs")
    return failed(f"{seen}: {gib(needed - free)} too much", fix_of(config, needed - free))


def fix_of(config, too_much: int) -> str:
    cache = float(config["KV_CACHE_GIB"] or 0) - too_much / GIB
    if cache >= LEAST_CACHE_GIB:
        return f"KV_CACHE_GIB={int(cache * 10) / 10:g} fits; or end other programs on that node"
    return "end other programs on that node, or serve on more nodes"
