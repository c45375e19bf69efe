"""Checks of what only a rank that runs can tell: versions inside, NCCL's library, clocks under load. Pure.

Named as the others are and left out in the same way; `start` makes them, once there is something to look at.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher import framing
from launcher.findings import CLOCKS_FIX, FAIL, FAULTY_CLOCKS, PASS, Finding

VERSIONS, LIBRARY, CLOCKS = "engine-versions", "nccl-library", "sm-clocks"
RUNNING_CHECKS = {
    VERSIONS: "vLLM, FlashInfer and torch inside each rank",
    LIBRARY: "the same libnccl inside each rank",
    CLOCKS: "the GPU's clock while it answers",
}


# Versions and libraries


@dataclass(frozen=True)
class Inside:
    """What inside.py says of a rank, or why it says nothing."""

    rank: int
    packages: Mapping[str, str] = field(default_factory=dict)
    nccl: Mapping[str, str] = field(default_factory=dict)  # path -> hash
    problem: str = ""


@dataclass(frozen=True)
class Pin:
    package: str
    name: str
    version: str
    reason: str
    docker_only: bool  # vLLM's CPU build has another number, and no FlashInfer


PINS = (
    Pin("vllm", "vLLM", "0.33.0",
        "the plugin's overrides and this launcher's safe defaults are made for that source", True),
    Pin("flashinfer_python", "FlashInfer", "0.7.2.post1",
        "others hang in sparse attention or mix up its rows (flashinfer#3700, #5015, #5095, #4484, #4541)", False),
)  # fmt: skip


def read_inside(rank: int, said: bytes) -> Inside:
    try:
        found = framing.object_with("packages", said) or {}
        return Inside(rank, dict(found["packages"]), dict(found["nccl"]))
    except (ValueError, KeyError, TypeError) as error:
        return Inside(rank, problem=f"its answer is not readable ({type(error).__name__}: {error})")


def check_versions(insides: Sequence[Inside], *, is_native: bool) -> Iterator[Finding]:
    reference = next((one for one in insides if not one.problem), None)
    for one in insides:
        wrong = list(version_problems(one, reference, is_native=is_native))
        for seen, fix in wrong:
            yield Finding(VERSIONS, one.rank, FAIL, seen, fix)
        if not wrong:
            named = (f"{name} {version}" for name, version in sorted(one.packages.items()))
            yield Finding(VERSIONS, one.rank, PASS, ", ".join(named))


def version_problems(one: Inside, reference: Inside | None, *, is_native: bool) -> Iterator[tuple[str, str]]:
    if one.problem:
        yield f"the versions inside could not be read: {one.problem}", "see that python3 runs there (`shell`)"
        return
    for pin in PINS:
        found = one.packages.get(pin.package, "")
        if found.partition("+")[0] == pin.version or (is_native and (pin.docker_only or not found)):
            continue
        yield (
            f"{pin.name} {found or 'is missing'} inside, {pin.version} is needed: {pin.reason}",
            f"use an image with {pin.name} {pin.version}; passed tests of this project with another release lift it",
        )
    differing = [f"{name} {one.packages.get(name, 'missing')} inside, {reference.packages.get(name, 'missing')} "
                 f"on node {reference.rank}"
                 for name in sorted({*one.packages, *reference.packages})
                 if one.packages.get(name) != reference.packages.get(name)]  # fmt: skip
    if differing:
        yield "; ".join(differing), "the same image (or packages) on every node"


def check_libraries(insides: Sequence[Inside]) -> Iterator[Finding]:
    known = [one for one in insides if not one.problem]
    for one in known:
        if one.nccl == known[0].nccl:
            yield Finding(LIBRARY, one.rank, PASS, libraries(one))
        else:
            yield Finding(
                LIBRARY, one.rank, FAIL,
                f"{libraries(one)} inside, {libraries(known[0])} on node {known[0].rank}: collectives of different "
                f"builds can stop after hours (NVIDIA/nccl#2334)",
                "the same image on every node, and nothing mounted or preloaded over its libnccl",
            )  # fmt: skip


def libraries(one: Inside) -> str:
    return ", ".join(f"{path} ({digest[:12]})" for path, digest in one.nccl.items()) or "no libnccl"


# Clocks

BUSY_PERCENT = 50
LEAST_BUSY_SAMPLES = 3


@dataclass(frozen=True)
class ClockSample:
    """None: the driver does not tell."""

    sm_mhz: float | None
    max_sm_mhz: float | None
    busy_percent: float | None

    @property
    def counts(self) -> bool:
        return bool(self.sm_mhz and self.max_sm_mhz and (self.busy_percent or 0) >= BUSY_PERCENT)

    @property
    def is_slow(self) -> bool:
        return self.sm_mhz < FAULTY_CLOCKS * self.max_sm_mhz


def check_clocks(samples: Mapping[int, Sequence[ClockSample]]) -> Iterator[Finding]:
    """Per rank; an idle GPU lowers its clock, so only samples of a busy one count."""
    for rank, own in sorted(samples.items()):
        busy = [sample for sample in own if sample.counts]
        slow = [sample for sample in busy if sample.is_slow]
        if len(busy) < LEAST_BUSY_SAMPLES:
            yield Finding(CLOCKS, rank, PASS, "not told: the GPU was not seen busy for long enough")
            continue
        clock = statistics.median(sample.sm_mhz for sample in busy)
        seen = f"SM clock {clock:.0f} of {busy[0].max_sm_mhz:.0f} MHz while busy"
        if 2 * len(slow) > len(busy):
            yield Finding(CLOCKS, rank, FAIL, f"{seen}: stuck low, and all wait for this node", CLOCKS_FIX)
        else:
            yield Finding(CLOCKS, rank, PASS, seen)
