"""A small base image that stands in for vLLM's: debootstrap's first stage, and packages with the right names.

vLLM's part is real as far as the selfcheck reads it: the metadata of the released wheel and the sources that the plugin
replaces parts of. torch, FlashInfer and transformers are metadata with next to nothing in them.
"""

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SITE = Path("usr/local/lib/python3.11/dist-packages")
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
# Of Debian's packages what nothing here reads.
UNUSED = ("var/cache/apt", "var/lib/apt", "debootstrap", "usr/share/doc", "usr/share/locale", "usr/share/man",
          "usr/share/zoneinfo", "usr/lib/x86_64-linux-gnu/gconv", "usr/lib/x86_64-linux-gnu/perl-base")  # fmt: skip

# Answers whatever a module asks for at import, and loads the stand-in for the kernels.
TORCH = """\
import ctypes, sys, types
__version__ = "2.14.0"

class Anything(type):
    def __getattr__(cls, name): return cls
    def __call__(cls, *args, **named): return cls
    def __or__(cls, other): return cls
    __ror__ = __or__

class Tensor(metaclass=Anything): pass

def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return Tensor

class Operators:
    def load_library(self, path):
        names = ctypes.c_char_p.in_dll(ctypes.CDLL(str(path)), "operators").value.decode().split()
        schema = lambda name: types.SimpleNamespace(default=types.SimpleNamespace(_schema=f"vllm_exl3::{name}(...)"))
        self.vllm_exl3 = types.SimpleNamespace(**{name: schema(name) for name in names})

ops = Operators()
"""

KERNELS = 'const char *operators = "{operators}";\nconst unsigned char code[] = {{{code}}};\n'


# The root file system


def debian(folder: Path) -> None:
    """Debian's packages unpacked, none configured: Python, a C compiler, and what they need."""
    command = ["debootstrap", "--foreign", "--variant=minbase", "--include=python3,tcc,libc6-dev"]
    done = subprocess.run(
        [*command, SUITE, folder, MIRROR], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
    for package in sorted((folder / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    for name in UNUSED:
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "usr/bin/cc").symlink_to("tcc")


def add_pip(folder: Path) -> None:
    """That of the environment in which the tests run."""
    installed = importlib.metadata.distribution("pip")
    for name in ("pip", f"pip-{installed.version}.dist-info"):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(str(installed.locate_file(name)), folder / SITE / name, ignore=leave)


def compile_python(folder: Path) -> None:
    """Debian does it when a package is configured. Without, every start of pip would."""
    for words in (["check"], ["install", "--no-index", "--dry-run", "--require-hashes", "none"], ["download", "-h"]):
        subprocess.run(["chroot", folder, "python3", "-m", "pip", *words], capture_output=True)


def distribution(folder: Path, name: str, version: str, files: dict[str, str], metadata: str = "") -> None:
    """Lays files with their RECORD and METADATA into a site folder."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    text = metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    written = {**files, f"{info}/METADATA": text, f"{info}/INSTALLER": "pip\n"}
    for path, content in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    (folder / info / "RECORD").write_text(record_of({path: text.encode() for path, text in written.items()}, info))


def record_of(files: dict[str, bytes], info: str) -> str:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([path, f"sha256={digest}", len(content)])
    writer.writerow([f"{info}/RECORD", "", ""])
    return lines.getvalue()


def add_packages(folder: Path, vllm_wheel: Path) -> None:
    site = folder / SITE
    nn = {"torch/nn/__init__.py": "", "torch/nn/functional.py": ""}
    distribution(site, "torch", "2.14.0", {"torch/__init__.py": TORCH, "torch/version.py": "cuda = '13.0'\n", **nn})
    distribution(site, "transformers", "5.19.0", {"transformers/__init__.py": ""})
    distribution(site, "flashinfer-python", "0.7.2.post1", {"flashinfer/__init__.py": ""})
    with zipfile.ZipFile(vllm_wheel) as wheel:
        sources = {name: wheel.read(name).decode() for name in overridden()}
        metadata = wheel.read("vllm-0.33.0.dist-info/METADATA").decode()
    distribution(site, "vllm", "0.33.0", {"vllm/__init__.py": "", **sources}, metadata)
    # What Ray needs and most bases have; msgpack is left out, and Ray is there at the locked version.
    for name, version in (("ray", "2.60.0"), *((name, "99.0") for name in NEEDED_BY_RAY)):
        distribution(site, name, version, {})


NEEDED_BY_RAY = (
    "attrs", "certifi", "charset-normalizer", "click", "filelock", "idna", "jsonschema", "jsonschema-specifications",
    "packaging", "protobuf", "pyyaml", "referencing", "requests", "rpds-py", "typing-extensions", "urllib3",
)  # fmt: skip


def overridden() -> list[str]:
    """Files of vLLM that the plugin replaces parts of."""
    from vllm_exl3 import selfcheck

    tables = [importlib.import_module(module).TABLE for module in selfcheck.OVERRIDING]
    modules = {override.module for table in tables for override in table} | {"vllm.v1.core.kv_cache_utils"}
    return sorted(module.replace(".", "/") + ".py" for module in modules)


# The plugin's wheel


def kernels(target: Path, architecture: int, operators: str) -> bytes:
    """A library with the operators' names and a fat binary that claims an architecture (121 for 12.1a)."""
    entry = struct.pack("<HHIQ12xI8xQ16x", 2, 0x101, 64, 4, architecture, 1 << 20) + b"\x7fELF"
    code = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
    source = target.with_suffix(".c")
    source.write_text(KERNELS.format(operators=operators, code=",".join(map(str, code))))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", target, source], check=True)
    return target.read_bytes()


def plain_wheel(folder: Path) -> Path:
    """The plugin without kernels, as pip makes it."""
    source = folder / "overlay"
    shutil.copytree(REPOSITORY / "overlay", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "_kernels.*"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    environment = {name: value for name, value in os.environ.items() if name != "EXL3_CUDA_ARCHS"}
    subprocess.run([*command, "--wheel-dir", folder, source], check=True, env=environment)
    return next(folder.glob("vllm_exl3-*.whl"))


def tagged_wheel(plain: Path, target: Path, tag: str, more: dict[str, bytes]) -> Path:
    """A copy of the wheel with a build tag and more files."""
    name, version, *_ = plain.name.split("-")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(plain) as wheel:
        files = {path: wheel.read(path) for path in wheel.namelist() if path != f"{info}/RECORD"} | more
    with zipfile.ZipFile(target / f"{name}-{version}-{tag}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/RECORD", record_of(files, info))
    return Path(wheel.filename)
