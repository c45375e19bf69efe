"""The ways in which Docker gives a container the GPU, which one a node takes, and what its daemon's refusals mean.

Which works depends on the daemon's version and on the toolkit's mode, so that nodes of one cluster may differ: the
probe tries them, in this order, in a container of the image.
"""

from __future__ import annotations

from collections.abc import Mapping

SEEN = ("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
WAYS: dict[str, tuple[str, ...]] = {
    "gpus": ("--gpus", "all"),
    "cdi": ("--device", "nvidia.com/gpu=all"),
    # Without an image's own variables this runtime gives nothing.
    "runtime": ("--runtime", "nvidia", *SEEN),
}

TOOLKIT = (
    "sudo apt-get install nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker "
    "&& sudo systemctl restart docker"
)
SPECIFICATION = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml && sudo systemctl restart docker"

# A part of what the daemon says, in small letters -> (what it means, what to do). The first that fits counts.
REFUSALS: dict[str, tuple[str, str]] = {
    "driver/library version mismatch": (
        "the driver was updated and the old one is still loaded", "reboot that node"
    ),
    "driver not loaded": ("NVIDIA's driver is not loaded", "see that nvidia-smi works on that node, or reboot it"),
    "using requested mode 'cdi'": (
        "NVIDIA's toolkit is in CDI mode, in which its hook refuses this flag", f"either `{SPECIFICATION}`, or "
        "`sudo nvidia-ctk config --set nvidia-container-runtime.mode=auto --in-place && sudo systemctl restart docker`"
    ),
    "nvidia-container-runtime-hook: no such file": (
        "the hook of NVIDIA's toolkit is gone though Docker was started with it", TOOLKIT
    ),
    "failed to discover gpu vendor from cdi": ("Docker finds no CDI description of a GPU", SPECIFICATION),
    "unresolvable cdi devices": ("no CDI description on the node has nvidia.com/gpu=all", SPECIFICATION),
    'could not select device driver "cdi"': (
        "Docker's CDI is off (before 28.2 it has to be turned on)",
        'put {"features": {"cdi": true}} into /etc/docker/daemon.json, then sudo systemctl restart docker',
    ),
    "is not an absolute path": ("this Docker knows no CDI (before 25)", "update Docker to 28.2 or newer"),
    "no such file or directory": ("this Docker knows no CDI (before 25)", "update Docker to 28.2 or newer"),
    "could not select device driver": ("Docker was started without NVIDIA's toolkit", TOOLKIT),
    "unknown or invalid runtime name": ("Docker has no runtime of the name nvidia", TOOLKIT),
    "unknown runtime specified": ("Docker has no runtime of the name nvidia", TOOLKIT),
    "nvidia-smi": ("a container starts, but without the GPU's programs", TOOLKIT),
}  # fmt: skip
UNKNOWN_FIX = "see that one of these shows the GPU on that node"


def words(way: str) -> tuple[str, ...]:
    """The arguments of `docker run`. A way that only a start can find stands there as it is: a placeholder."""
    return WAYS.get(way) or (way,)


def shown(way: str) -> str:
    """As a user would type it; the variables say nothing to him."""
    return "`" + " ".join(words(way)[:2]) + "`"


def meaning_of(said: str) -> tuple[str, str]:
    """(what a refusal means, what to do)."""
    for part, meaning in REFUSALS.items():
        if part in said.lower():
            return meaning
    return (f"{said.strip()[-200:] or 'no word why'}", UNKNOWN_FIX)


def refused(tried: Mapping[str, str]) -> tuple[str, str]:
    """(what became of each way that was tried, what to do first)."""
    found = [(way, *meaning_of(said)) for way, said in tried.items()]
    seen = "; ".join(f"{shown(way)}: {meaning}" for way, meaning, _ in found)
    fixes = dict.fromkeys(fix for _, _, fix in found)
    known = [fix for fix in fixes if fix != UNKNOWN_FIX]
    tests = " or ".join(f"docker run --rm {' '.join(words(way)[:2])} IMAGE nvidia-smi -L" for way in tried)
    return seen, (known[0] if known else f"{UNKNOWN_FIX}: {tests}")
