#!/usr/bin/env python3
"""Compile csrc/ into vllm_exl3/_kernels.so, ahead of time and for named GPU architectures.

    python overlay/build_kernels.py [--arch 12.1a --arch 9.0] [--out DIR] [--jobs N]

`pip install overlay/` calls `build` when EXL3_CUDA_ARCHS names architectures (setup.py). Needs nvcc 12.9 or
newer, a C++20 compiler and torch 2.11 or newer with its headers (the CPU build has them); no GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
LIBRARY = "_kernels.so"
LOG = "_kernels.log"  # what ptxas says of every kernel: registers, spills, shared memory

# Compute capabilities: a DGX Spark, which the product is for, and the GPU that its tests run on.
ARCHITECTURES = ("12.1a", "9.0a")
ARCHITECTURE_FORM = re.compile(r"(\d{1,2})\.(\d[af]?)")

SYSTEM_CUDA = "/usr/local/cuda"
OLDEST_TORCH = (2, 11)
OLDEST_NVCC = (12, 9)  # the first that knows 12.1a
# One compiler of large templates takes up to this much memory.
BYTES_PER_JOB = 3 * 2**30


class KernelBuildError(RuntimeError):
    """The kernels cannot be built; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Toolchain:
    nvcc: Path
    torch: Path  # the package's folder


def parse_architectures(text: str) -> tuple[str, ...]:
    """'12.1a;9.0a' or '12.1a 9.0a' -> ('12.1a', '9.0a'). Raises KernelBuildError naming the odd one."""
    names = tuple(dict.fromkeys(text.replace(";", " ").replace(",", " ").split()))
    for name in names:
        if not ARCHITECTURE_FORM.fullmatch(name):
            raise KernelBuildError(f"architecture {name!r}: expected a compute capability such as 12.1a or 9.0a")
    if not names:
        raise KernelBuildError(f"no architecture is named; the usual ones are {';'.join(ARCHITECTURES)}")
    return names


def gencode(architecture: str) -> str:
    number = "".join(ARCHITECTURE_FORM.fullmatch(architecture).groups())
    return f"-gencode=arch=compute_{number},code=sm_{number}"


# What is on this machine


def find_toolchain() -> Toolchain:
    """Raises KernelBuildError where nvcc or torch is missing or too old."""
    nvcc = _find_nvcc()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None or tuple(map(int, release.groups())) < OLDEST_NVCC:
        raise KernelBuildError(f"{nvcc}: is {version.strip().splitlines()[-1]!r}, needed is CUDA 12.9 or newer")
    return Toolchain(nvcc, _torch_folder())


def _find_nvcc() -> Path:
    homes = [os.environ.get("CUDA_HOME"), SYSTEM_CUDA]
    places = [Path(home, "bin/nvcc") for home in homes if home] + [_pip_nvcc()]
    found = shutil.which("nvcc")
    for place in ([Path(found)] if found else []) + places:
        if place and place.is_file():
            return place.resolve()
    raise KernelBuildError(
        "nvcc: is not on PATH, in $CUDA_HOME/bin, in /usr/local/cuda/bin or among this Python's packages; install "
        "the CUDA toolkit, or pip install --no-deps -r requirements/cuda-compiler.txt"
    )


def _pip_nvcc() -> Path | None:
    """The compiler of NVIDIA's pip packages, which share one folder."""
    for path in map(Path, sys.path):
        for nvcc in sorted(path.glob("nvidia/cu1[2-9]/bin/nvcc")):
            return nvcc
    return None


def _torch_folder() -> Path:
    try:
        import torch
    except ImportError as error:
        raise KernelBuildError(
            "torch: its headers are needed and this Python has no torch; install torch 2.11 or newer, and let pip use "
            "it with --no-build-isolation"
        ) from error
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise KernelBuildError(f"torch: is {torch.__version__}, its stable ABI is needed from 2.11 on")
    return Path(torch.__file__).parent


def job_count(wanted: int | None) -> int:
    """As many compilers as cores and free memory allow."""
    if wanted:
        return wanted
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return max(1, min(len(os.sched_getaffinity(0)), int(available[1]) * 1024 // BYTES_PER_JOB))


# Commands


def compile_commands(tools: Toolchain, architectures: tuple[str, ...], folder: Path) -> dict[Path, list[str]]:
    """Object file -> the command that makes it. Names are relative to csrc/, so that no folder is in the result."""
    major, minor = OLDEST_TORCH
    host = "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"
    common = [str(tools.nvcc), "-std=c++20", "-O3", host, "-cudart=static"]
    kernels = [*map(gencode, architectures), "-lineinfo", "-Xptxas=-v"]
    torch = ["-isystem", str(tools.torch / "include"), f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}ULL"]
    commands = {}
    for source in sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cpp")]):
        target = folder / f"{source.stem}.o"
        special = kernels if source.suffix == ".cu" else torch
        commands[target] = [*common, *special, "-c", source.name, "-o", str(target)]
    return commands


def link_command(tools: Toolchain, objects: list[Path], target: Path) -> list[str]:
    # What only torch's CUDA build has is looked up when it is used (binding.cpp), so that the CPU build loads it.
    # Without symbols, which hold names of temporary files: the same sources give the same bytes.
    return [
        str(tools.nvcc), "-shared", "-cudart=static", "-nodlink", *map(str, objects), "-o", str(target),
        "-L", str(tools.nvcc.parent.parent / "lib"), "-L", str(tools.torch / "lib"), "-ltorch_cpu", "-ldl",
        "-Xlinker=--exclude-libs,ALL", "-Xlinker=--strip-all",
    ]  # fmt: skip


# Building


def build(architectures: tuple[str, ...], out: Path, folder: Path, jobs: int | None = None) -> Path:
    """Compile and link into out/_kernels.so; object files in `folder` are used again while nothing changed."""
    tools, out, folder = find_toolchain(), out.resolve(), folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    commands = compile_commands(tools, architectures, folder)
    with ThreadPoolExecutor(job_count(jobs)) as pool:
        logs = list(pool.map(_compile, commands, commands.values()))
    (out / LOG).write_text("".join(logs), encoding="utf-8")
    partial = out / f"{LIBRARY}.partial"
    _run(link_command(tools, list(commands), partial))
    partial.replace(out / LIBRARY)  # never written in place: a process may have the old one loaded
    return out / LIBRARY


def _compile(target: Path, command: list[str]) -> str:
    """Run the command unless its result is there and newer than every source; returns what the compiler said."""
    log, said = target.with_suffix(".log"), target.with_suffix(".command")
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir())
    is_current = target.is_file() and log.is_file() and target.stat().st_mtime > newest
    if not (is_current and said.is_file() and said.read_text() == "\n".join(command)):
        log.write_text(_run(command), encoding="utf-8")
        said.write_text("\n".join(command))
    return f"# {target.stem}\n{log.read_text(encoding='utf-8')}"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=SOURCES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        said = [line for line in done.stdout.splitlines() if not re.match(r"ptxas info|\s+\d+ bytes stack", line)]
        raise KernelBuildError("\n".join([" ".join(command), *said[-40:], f"ended with {done.returncode}"]))
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help=f"default: {' and '.join(ARCHITECTURES)}")
    parser.add_argument("--out", type=Path, default=HERE / "vllm_exl3")
    parser.add_argument("--build", type=Path, default=HERE / "build" / "kernels", help="object files")
    parser.add_argument("--jobs", type=int)
    args = parser.parse_args()
    try:
        architectures = parse_architectures(" ".join(args.arch or ARCHITECTURES))
        print(build(architectures, args.out, args.build, args.jobs))
    except KernelBuildError as error:
        sys.exit(f"build_kernels: {error}")


if __name__ == "__main__":
    main()
