"""Makes or finds every wheel that goes into the image, and the library of launcher/fabric_bind.c: the build stage.

python3 image/wheels.py BASE OUT      BASE as image/base.py took it; OUT gets wheels/ and fabric_bind.so

Reads CUDA_ARCHS, EXLLAMAV3 (a version, or "skip"), OFFLINE and JOBS, which are arguments of the Dockerfile. A wheel in
image/wheels is used if it is the right one: a locked one by its hash, ours by its build tag, which is a digest of what
it was made from. OFFLINE=1 asks no package index.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "launcher"), str(ROOT / "overlay"), str(ROOT / "image")]

import recipe  # noqa: E402
from base import normalised  # noqa: E402

VENDORED = ROOT / "image" / "wheels"
LOCK, TOOLS_LOCK = ROOT / "requirements/image.txt", ROOT / "requirements/image-build.txt"
EXTENSION_BUILDER = ROOT / "tools/gpu/exllamav3_ext/build.py"
EXLLAMAV3 = "1.6.5"
SKIPPED = "skip"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
# Of exllamav3's kernels everything that the plugin can call; bits 0 stands for matrices of different rates.
RATES = {
    "--moe": ",".join(f"{bits}:{codebook}" for bits in range(9) for codebook in (1, 2)),
    "--gemm": ",".join(f"{bits}:{codebook}" for bits in range(1, 9) for codebook in (0, 1, 2)),
    "--coop": ",".join(map(str, range(1, 9))),
}

METADATA = f"""\
Metadata-Version: 2.1
Name: exllamav3-ext
Version: {EXLLAMAV3}
Summary: The compiled extension of exllamav3 without its Python package
License: MIT
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: image/wheels.py
Root-Is-Purelib: false
Tag: {kind}
Build: {tag}
"""


class WheelError(RuntimeError):
    """A wheel cannot be made or found; the message says which and what to do."""


@dataclass(frozen=True)
class Settings:
    archs: str
    exllamav3: str
    offline: bool
    jobs: int | None

    @classmethod
    def read(cls, environment=os.environ) -> "Settings":
        found = cls(environment.get("CUDA_ARCHS", "12.1a"), environment.get("EXLLAMAV3", EXLLAMAV3),
                    environment.get("OFFLINE", "") == "1", int(environment.get("JOBS") or 0) or None)  # fmt: skip
        if found.exllamav3 not in (EXLLAMAV3, SKIPPED):
            raise WheelError(f"EXLLAMAV3: is {found.exllamav3!r}, expected {EXLLAMAV3} (the lock has no other one) or "
                             f"{SKIPPED!r}")  # fmt: skip
        return found

    @property
    def index(self) -> list[str]:
        """Where pip looks."""
        return ["--find-links", str(VENDORED), *(["--no-index"] if self.offline else [])]


# What is locked: Ray, and what it needs and the base lacks


def locked(text: str) -> dict[str, str]:
    """Normalised name -> its lines of the lock; a name may have several versions with their own markers."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=[^\s#])", "\n" + text):
        match = re.match(r"([A-Za-z0-9._-]+)==", block)
        if match:
            name = normalised(match[1])
            found[name] = found.get(name, "") + block.rstrip() + "\n"
    return found


def lacking(packages: dict[str, str], lock: dict[str, str]) -> dict[str, str]:
    """Of the lock what the base does not have. Ray itself has to have the locked version, the others any."""
    has = {name: name in packages for name in lock}
    has["ray"] = f"ray=={packages.get('ray')} " in lock["ray"]
    return {name: lines for name, lines in lock.items() if not has[name]}


def fetch_locked(packages: dict[str, str], out: Path, settings: Settings) -> None:
    needed = lacking(packages, locked(LOCK.read_text()))
    listing = out / "needed.txt"
    listing.write_text("".join(needed.values()))
    print(f"packages that the base lacks: {', '.join(needed) or 'none'}", flush=True)
    if needed:
        pip("download", "--no-deps", "--require-hashes", "--only-binary", ":all:", *settings.index,
            "--dest", str(out / "wheels"), "--requirement", str(listing),
            what=f"{', '.join(needed)} with the hashes of {LOCK.relative_to(ROOT)}")  # fmt: skip


def pip(*words: str, what: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run([*PIP, *words], env={**os.environ, **(environment or {})})
    if done.returncode:
        raise WheelError(
            f"{what}: pip could not get it, see above. Without a network, put the wheels into image/wheels and build "
            f"with OFFLINE=1 (docs/image.md)"
        )


# Ours


def build_tag(*inputs: str) -> str:
    """Of a wheel's file name; has to begin with a digit."""
    return "0" + hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:15]


def plugin_tag(archs: str) -> str:
    return build_tag(recipe.digest(ROOT, ("overlay",)), archs, platform.machine())


def extension_tag(archs: str, packages: dict[str, str]) -> str:
    """The extension uses torch's C++ interface and Python's, so it belongs to one version of each."""
    sources = recipe.digest(ROOT, ("tools/gpu/exllamav3_ext",))
    soabi = sysconfig.get_config_var("SOABI")
    return build_tag(sources, EXLLAMAV3, archs, soabi, packages["torch"], json.dumps(RATES))


def vendored(name: str, tag: str, settings: Settings) -> Path | None:
    """The wheel from image/wheels that was made from exactly these sources; raises where it is needed and not there."""
    there = sorted(VENDORED.glob(f"{name}-*.whl"))
    right = [path for path in there if path.name.split("-")[2] == tag]
    if right:
        return right[0]
    others = (
        f"{' and '.join(path.name for path in there)} there was made from other sources" if there else "none is there"
    )
    if settings.offline:
        raise WheelError(
            f"{name}: OFFLINE=1 needs its wheel with the build tag {tag} in image/wheels, and {others}; make it where "
            f"there is a network: docker build --target wheels --output image/wheels ."
        )
    if there:
        print(f"{name}: {others}, so it is made anew (build tag {tag})")
    return None


def plugin(out: Path, settings: Settings) -> Path:
    tag = plugin_tag(settings.archs)
    if ready := vendored("vllm_exl3", tag, settings):
        return Path(shutil.copy2(ready, out / "wheels"))
    environment = tools(out, settings)
    environment |= {"EXL3_CUDA_ARCHS": settings.archs, "EXL3_BUILD_JOBS": str(settings.jobs or "")}
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out / "plain"),
        str(ROOT / "overlay"), what="the plugin's wheel", environment=environment)  # fmt: skip
    (plain,) = (out / "plain").glob("vllm_exl3-*.whl")
    subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--build", tag, str(plain)],
                   check=True, env={**os.environ, **environment})  # fmt: skip
    (tagged,) = (out / "plain").glob("vllm_exl3-*.whl")
    return Path(shutil.move(tagged, out / "wheels"))


def extension(packages: dict[str, str], out: Path, settings: Settings) -> Path | None:
    """exllamav3's extension alone, as a package of its own: exllamav3 itself would bring more than is used."""
    if settings.exllamav3 == SKIPPED:
        print("exllamav3_ext: left out, since EXLLAMAV3=skip")
        return None
    tag = extension_tag(settings.archs, packages)
    if ready := vendored("exllamav3_ext", tag, settings):
        return Path(shutil.copy2(ready, out / "wheels"))
    environment = tools(out, settings)
    folder = out / "extension"
    done = subprocess.run(extension_command(Path(environment["PYTHONPATH"]), folder, settings),
                          env={**os.environ, **environment})  # fmt: skip
    if done.returncode:
        raise WheelError(f"exllamav3_ext: its compilation ended with {done.returncode}, see above")
    (library,) = folder.glob("exllamav3_ext.*.so")
    return pack_extension(library, tag, out / "wheels")


def extension_command(tools_folder: Path, folder: Path, settings: Settings) -> list[str]:
    import build_kernels

    headers = sysconfig.get_paths()["include"]
    if not Path(headers, "Python.h").is_file():
        raise WheelError(f"exllamav3_ext: {headers}/Python.h is not in the base; build on one that has it")
    rates = [word for pair in RATES.items() for word in pair]
    return [
        sys.executable, str(EXTENSION_BUILDER), "--source", str(tools_folder / "exllamav3"),
        "--torch", str(build_kernels._torch_folder()), "--python-include", headers,
        "--toolkit", str(tools_folder / "nvidia/cu13"), "--cuda", str(cuda_libraries()),
        "--out", str(folder), "--soabi", sysconfig.get_config_var("SOABI"),
        "--jobs", str(build_kernels.job_count(settings.jobs)),
        "--arch", *(arch.replace(".", "") for arch in build_kernels.parse_architectures(settings.archs)), *rates,
    ]  # fmt: skip


def cuda_libraries() -> Path:
    """The folder with cuBLAS' headers and library that torch was installed with."""
    for place in [*(Path(path, "nvidia/cu13") for path in sys.path), Path("/usr/local/cuda")]:
        if (place / "include/cublas_v2.h").is_file():
            return place
    raise WheelError(
        "exllamav3_ext: no cublas_v2.h in nvidia/cu13 of the base's Python or in /usr/local/cuda; build on a base that "
        "has CUDA 13's headers"
    )


def pack_extension(library: Path, tag: str, folder: Path) -> Path:
    from wheel.wheelfile import WheelFile

    python = library.name.split(".")[1].split("-")[1]  # cpython-312-... -> 312
    kind = f"cp{python}-cp{python}-linux_{platform.machine()}"
    target, info = folder / f"exllamav3_ext-{EXLLAMAV3}-{tag}-{kind}.whl", f"exllamav3_ext-{EXLLAMAV3}.dist-info"
    with WheelFile(target, "w") as file:
        file.write(library, library.name)
        file.writestr(f"{info}/METADATA", METADATA)
        file.writestr(f"{info}/WHEEL", WHEEL.format(kind=kind, tag=tag))
    return target


def tools(out: Path, settings: Settings) -> dict[str, str]:
    """Installs the locked compiler beside the base's packages; returns the environment that finds it."""
    folder = out / "tools"
    if not folder.is_dir():
        pip("install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile", *settings.index,
            "--target", str(folder), "--requirement", str(TOOLS_LOCK),
            what=str(TOOLS_LOCK.relative_to(ROOT)))  # fmt: skip
    home = folder / "nvidia/cu13"
    sys.path.append(str(folder))
    return {"PYTHONPATH": str(folder), "CUDA_HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}


# The library that binds ports


def fabric_bind(out: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise WheelError(
            "base image: has no C compiler (cc, gcc or clang), which Triton and FlashInfer need at first use; build on "
            "vllm/vllm-openai or another base that has one"
        )
    source = ROOT / "launcher/fabric_bind.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(out / "fabric_bind.so"), str(source), "-ldl"], check=True
    )


# The command


def described(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        yield f"wheel: {path.name}, {path.stat().st_size / 2**20:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    packages = json.loads(args.base.read_text())["packages"]
    (args.out / "wheels").mkdir(parents=True, exist_ok=True)
    try:
        settings = Settings.read()
        fabric_bind(args.out)
        fetch_locked(packages, args.out, settings)
        plugin(args.out, settings)
        extension(packages, args.out, settings)
    except (WheelError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    print("\n".join(described(args.out / "wheels")))


if __name__ == "__main__":
    main()
