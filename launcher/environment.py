"""The Python environment of the local topology: made aside from the lock, known by a stamp, put in place when complete.

`.venv-local` is a link to it, so that its programs have one path while the environment behind it changes at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher import console, pip_output, venvs
from launcher.errors import Exit, LauncherError
from launcher.settings import REPOSITORY

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
NEEDED_DISK_GIB = 4.0  # the environment itself and what pip unpacks on the way
PLUGIN = "vllm_exl3:register"
KIND = "local"  # of the folders in .venvs

# vLLM imports torchvision before it loads any plugin, so the plugin's cure for torchvision beside a CPU
# torch has to be in place when the interpreter starts. The file costs nothing where nobody imports torchvision.
STARTUP_FILE = "vllm_exl3_startup.pth"
STARTUP_LINE = "import vllm_exl3.cpu.torchvision_ops; vllm_exl3.cpu.torchvision_ops.install()\n"


@dataclass(frozen=True)
class Sources:
    """What an environment is made from."""

    folder: Path = REPOSITORY / ".venv-local"
    lock: Path = REPOSITORY / "requirements/local.txt"
    tests: Path = REPOSITORY / "requirements/test.txt"
    overlay: Path = REPOSITORY / "overlay"

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def real(self) -> Sources:
        """With the folder to which `folder` leads now: what runs in that keeps it, whatever is put in place later."""
        return replace(self, folder=Path(os.path.realpath(self.folder)))

    @property
    def store(self) -> Path:
        return self.folder.parent / ".venvs"


@dataclass(frozen=True)
class Stamp:
    """What an environment was made from. None: that part is not in place."""

    folder: str  # an environment does not survive being moved
    interpreter: str
    torch: str
    lock: str
    overlay: str | None
    tests: str | None

    def same_base(self, other: Stamp) -> bool:
        return replace(self, overlay=None, tests=None) == replace(other, overlay=None, tests=None)


# Deciding


def wanted_stamp(sources: Sources, with_tests: bool, found: Stamp | None) -> Stamp:
    """The stamp of a complete environment; it keeps an interpreter and test packages that are already there."""
    keeps_interpreter = found is not None and Path(found.interpreter).exists()
    keeps_tests = found is not None and found.tests is not None
    return Stamp(
        folder=str(sources.real.folder),
        interpreter=found.interpreter if keeps_interpreter else os.path.realpath(sys.executable),
        torch=TORCH,
        lock=hash_files([sources.lock]),
        overlay=hash_files(overlay_files(sources.overlay)),
        tests=hash_files([sources.tests]) if with_tests or keeps_tests else None,
    )


def missing_steps(found: Stamp | None, wanted: Stamp) -> tuple[str, ...]:
    """What has to be done, in order. A base that is not whole is made anew, never repaired."""
    tests = ("tests",) if wanted.tests else ()
    if found is None or not found.same_base(wanted):
        return ("python", "torch", "packages", "overlay", *tests)
    return (
        *(("overlay",) if found.overlay != wanted.overlay else ()),
        *(tests if found.tests != wanted.tests else ()),
    )


def torch_commands(python: Path) -> list[list[str]]:
    """Ways to get torch's CPU build, in order: what pip is set up with, then the PyTorch index.

    The version names the CPU build, so that no way can bring another one.
    """
    install = [*pip(python), "install", "--no-deps", "--only-binary", ":all:"]
    return [
        [*install, "--retries", "1", TORCH],
        [*install, "--retries", "2", "--timeout", "30", "--index-url", TORCH_INDEX, TORCH],
    ]


def lock_command(python: Path, lock: Path) -> list[str]:
    return [*pip(python), "install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(lock)]


def overlay_command(python: Path, source: Path) -> list[str]:
    """Installs a copy, so that a running server never sees half a `git pull`."""
    return [
        *pip(python),
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--force-reinstall",
        str(source),
    ]


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check"]


def pip_environment(ambient: Mapping[str, str]) -> dict[str, str]:
    """The caller's sources and proxies stay; what would put packages elsewhere goes."""
    misleading = {"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV", "VIRTUAL_ENV"}
    return {name: value for name, value in ambient.items() if name not in misleading and not name.startswith("PYTHON")}


# Looking


def read_stamp(sources: Sources) -> Stamp | None:
    """None as well when the interpreter that the environment points to has gone."""
    try:
        stamp = Stamp(**venvs.read_stamp(sources.folder))
    except TypeError:
        return None
    return stamp if os.path.realpath(sources.python) == stamp.interpreter and sources.python.exists() else None


def overlay_files(folder: Path) -> list[Path]:
    # The CUDA sources and what is compiled from them are not for this environment.
    others = {"build", "__pycache__", "csrc", "_kernels.so", "_kernels.log"}
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not others & set(path.relative_to(folder).parts) and ".egg-info" not in str(path)
    )


def hash_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {path.parent.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def check_host(free_bytes: Callable[[Path], int], sources: Sources) -> None:
    """Refuses what cannot work before anything is written."""
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        raise LauncherError(
            f"python: {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}, vLLM's CPU build needs 3.11 to "
            f"3.14; "
            f"install one of these, for example `sudo apt-get install python3.12 python3.12-venv`."
        )
    free_gib = free_bytes(sources.folder.parent) / 2**30
    if free_gib < NEEDED_DISK_GIB:
        raise LauncherError(
            f"disk: {sources.folder.parent} has {free_gib:.1f} GiB free, the environment needs "
            f"{NEEDED_DISK_GIB:.0f} GiB; "
            f"make room or move the checkout."
        )


def free_disk_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


# Doing


def make_environment(
    sources: Sources, log: Path, with_tests: bool = False, ambient: Mapping[str, str] = os.environ
) -> int:
    """Brings the environment up to date; does nothing, quickly, when it is. What is there stays until another is.

    Returns a descriptor for the processes that will run in it (venvs.hold).
    """
    with venvs.locked(sources.store / f"{KIND}.lock", lambda: console.say("Waits for another set-up to end ...")):
        put_finished_in_place(sources)
        found = read_stamp(sources)
        wanted = wanted_stamp(sources, with_tests, found)
        steps = missing_steps(found, wanted)
        if steps:
            console.say(f"Environment {sources.folder} (log: {log})")
            with log.open("w") as stream:
                change = make_aside if "python" in steps else update
                change(sources, wanted, steps, stream, pip_environment(ambient))
        venvs.tidy(other for other in venvs.folders(sources.store, KIND) if other != sources.real.folder)
        return venvs.hold(sources.real.folder)


def make_aside(sources: Sources, wanted: Stamp, steps, stream, ambient: Mapping[str, str]) -> None:
    check_host(free_disk_bytes, sources)
    venvs.tidy(other for other in venvs.folders(sources.store, KIND) if venvs.read_stamp(other) is None)
    aside = replace(sources, folder=venvs.new_folder(sources.store, KIND))
    try:
        install(Installer(aside, stream, ambient), steps)
    except BaseException:
        shutil.rmtree(aside.folder, ignore_errors=True)
        raise
    venvs.write_stamp(aside.folder, asdict(replace(wanted, folder=str(aside.folder))))
    put_in_place(sources, aside.folder)


def update(sources: Sources, wanted: Stamp, steps, stream, ambient: Mapping[str, str]) -> None:
    """Plugin and test packages, in the environment that is there. Until a step is over its part counts as missing."""
    real = sources.real
    stamp = replace(wanted, **dict.fromkeys(steps, None))
    venvs.write_stamp(real.folder, asdict(stamp))
    install(Installer(real, stream, ambient), steps)
    venvs.write_stamp(real.folder, asdict(wanted))


def install(installer: Installer, steps) -> None:
    for step in steps:
        with console.phase(step) as progress:
            installer.run(step, progress)


def put_in_place(sources: Sources, folder: Path) -> None:
    """At once where a link is replaced; a folder of an older checkout first joins the others."""
    link = sources.store / f"{KIND}.link"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(sources.folder.parent))
    if sources.folder.is_dir() and not sources.folder.is_symlink():
        sources.folder.rename(venvs.new_folder(sources.store, KIND))
    link.replace(sources.folder)


def put_finished_in_place(sources: Sources) -> None:
    """What a killed set-up had completed, and not yet put in place."""
    found = read_stamp(sources)
    if found is None or not found.same_base(wanted_stamp(sources, False, found)):
        for folder in venvs.folders(sources.store, KIND):
            one = replace(sources, folder=folder)
            found = read_stamp(one)
            if found and found.same_base(wanted_stamp(one, False, found)):
                put_in_place(sources, folder)
                return


class Installer:
    """The steps. Each one's commands write to the log; a failure tells the reason."""

    def __init__(self, sources: Sources, log, environment: Mapping[str, str]):
        self.sources = sources
        self.log = log
        self.environment = environment

    def run(self, step: str, progress: console.Progress) -> None:
        getattr(self, f"step_{step}")(progress)

    def step_python(self, progress) -> None:
        self.must([sys.executable, "-m", "venv", str(self.sources.folder)], progress, "python")

    def step_torch(self, progress) -> None:
        if not any(self.call(command, progress) == 0 for command in torch_commands(self.sources.python)):
            self.fail("torch", f"neither pip's own sources nor {TORCH_INDEX} gave {TORCH}")
        self.must([str(self.sources.python), "-c", CHECK_TORCH], progress, "torch")

    def step_packages(self, progress) -> None:
        self.must(
            lock_command(self.sources.python, self.sources.lock),
            progress,
            "packages",
            count_packages(self.sources.lock),
        )

    def step_tests(self, progress) -> None:
        self.must(lock_command(self.sources.python, self.sources.tests), progress, "tests")

    def step_overlay(self, progress) -> None:
        # Built from a copy: setuptools leaves its work, and deleted modules, in the folder that it builds.
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "overlay"
            shutil.copytree(
                self.sources.overlay, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
            )
            self.must(overlay_command(self.sources.python, copy), progress, "overlay")
        self.must([str(self.sources.python), "-c", WRITE_STARTUP, STARTUP_FILE, STARTUP_LINE], progress, "overlay")
        self.must([str(self.sources.python), "-c", CHECK_OVERLAY, PLUGIN], progress, "overlay")

    def must(self, command: list[str], progress, step: str, total: int = 0) -> None:
        code = self.call(command, progress, total)
        if code != 0:
            self.fail(
                step, f"`python {' '.join(command[1:4]).splitlines()[0].strip()} ...` ended with exit code {code}"
            )

    def call(self, command: list[str], progress, total: int = 0) -> int:
        self.log.write(f"$ {' '.join(command)}\n")
        self.log.flush()
        self.said_from, self.is_own = Path(self.log.name).stat().st_size, command[1] == "-c"
        child = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=dict(self.environment)
        )
        try:
            while child.poll() is None:
                progress.tick(self.count_collected(total))
                time.sleep(0.2)
            return child.returncode
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()

    def count_collected(self, total: int) -> str:
        if not total:
            return ""
        text = Path(self.log.name).read_text(errors="replace")
        done = sum(line.startswith("Collecting ") for line in text.splitlines())
        return "installing" if "Installing collected" in text else f"{done} of about {total}"

    def fail(self, step: str, what: str) -> None:
        path = Path(self.log.name)
        raise LauncherError(
            f"environment: step {step}: {what}: {self.reason()}; nothing half-made will be used, look at {path} and "
            f"start again.",
            Exit.SETUP,
        )

    def reason(self) -> str:
        """Of the last command. A program of this file says it in its last line; pip's words stay in the log."""
        self.log.flush()
        said = Path(self.log.name).read_bytes()[self.said_from :].decode(errors="replace").strip()
        return said.splitlines()[-1].rstrip(".") if self.is_own and said else pip_output.reason(said)


def count_packages(lock: Path) -> int:
    return sum(line[:1].isalpha() for line in lock.read_text().splitlines())


# torch itself cannot be imported before the packages that it needs are there.
CHECK_TORCH = """
import importlib.util, pathlib, runpy
package = pathlib.Path(importlib.util.find_spec("torch").origin).parent
version = runpy.run_path(str(package / "version.py"))
if version["cuda"] is not None or version["__version__"].split("+")[0] != "2.13.0":
    raise SystemExit(f"torch is {version['__version__']} with CUDA {version['cuda']}; 2.13.0 without CUDA is needed")
"""

CHECK_OVERLAY = """
import sys
from importlib.metadata import entry_points
found = [point.value for point in entry_points(group="vllm.general_plugins") if point.name == "exl3"]
if found != [sys.argv[1]]:
    raise SystemExit(f"vLLM would find {found} as the plugin exl3, not {sys.argv[1]}")
import vllm_exl3
"""

WRITE_STARTUP = """
import pathlib, sys, sysconfig
(pathlib.Path(sysconfig.get_path("purelib")) / sys.argv[1]).write_text(sys.argv[2])
"""
