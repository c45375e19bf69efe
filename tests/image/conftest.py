"""Builds the Dockerfile with buildah, on a small base, in a storage that lives as long as the tests."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_base
from needs import DEBIAN_KEYS
from small_base import REPOSITORY

from launcher import recipe

OPERATORS = "fat_moe fat_moe_workspace_bytes decode_inner"


@pytest.fixture(scope="session", autouse=True)
def images_can_be_built(need):
    need("root", "namespaces", "mount", "buildah", "debootstrap", DEBIAN_KEYS, "cc", "/usr/include/stdio.h")


@dataclass(frozen=True)
class Buildah:
    folder: Path

    def run(self, *words: object, check: bool = True) -> subprocess.CompletedProcess:
        store = ("--root", self.folder / "root", "--runroot", self.folder / "run", "--storage-driver", "vfs")
        command = ["buildah", *store, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0 or not check, f"{command}\n{done.stdout[-4000:]}"
        return done

    def build(self, context: Path, *words: object, dockerfile: Path | None = None) -> subprocess.CompletedProcess:
        """Never asks a registry."""
        file = dockerfile or context / "Dockerfile"
        return self.run("bud", "--isolation", "chroot", "--pull-never", "-f", file, *words, context, check=False)

    def variant(self, name: str, folder: Path, *lines: str) -> str:
        """An image made from the small base by a few instructions."""
        file = folder / f"{name}.dockerfile"
        file.write_text("\n".join(["FROM localhost/small-base", *lines, ""]))
        done = self.build(folder, "-q", "-t", name, dockerfile=file)
        assert done.returncode == 0, done.stdout
        return f"localhost/{name}"

    def inspect(self, image: str) -> dict:
        return json.loads(self.run("inspect", "--type", "image", image).stdout)

    def read(self, image: str, path: str) -> str:
        """A file of an image."""
        container = self.run("from", "--pull-never", image).stdout.strip()
        try:
            return (Path(self.run("mount", container).stdout.strip()) / path.lstrip("/")).read_text()
        finally:
            self.run("rm", container)


@pytest.fixture(scope="session")
def buildah(tmp_path_factory, images_can_be_built):
    """Its storage driver copies whole trees, so it works in memory."""
    folder = tmp_path_factory.mktemp("storage")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6g", "none", folder], check=True)
    yield Buildah(folder)
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="session")
def vllm_wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-cache-dir", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", folder, "vllm==0.33.0"], check=True)
    return next(folder.glob("vllm-0.33.0-*.whl"))


@pytest.fixture(scope="session")
def base(buildah, vllm_wheel) -> str:
    """The small base's name."""
    root = buildah.folder / "debian"
    small_base.debian(root)
    small_base.add_pip(root)
    small_base.add_packages(root, vllm_wheel)
    small_base.compile_python(root)
    file = buildah.folder / "small.dockerfile"
    file.write_text("FROM scratch\nCOPY . /\n")
    done = buildah.build(root, "-q", "-t", "small-base", dockerfile=file)
    assert done.returncode == 0, done.stdout
    shutil.rmtree(root)
    return "localhost/small-base"


@pytest.fixture(scope="session")
def wheels_program():
    """image/wheels.py as a module."""
    spec = importlib.util.spec_from_file_location("image_wheels", REPOSITORY / "image/wheels.py")
    module = sys.modules["image_wheels"] = importlib.util.module_from_spec(spec)
    path = sys.path[:]  # the program finds its neighbours by it, and no test must
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(scope="session")
def plain_wheel(tmp_path_factory) -> Path:
    return small_base.plain_wheel(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def msgpack_wheel(tmp_path_factory, wheels_program) -> Path:
    """What the small base lacks of Ray's needs, by the lock."""
    folder = tmp_path_factory.mktemp("msgpack")
    lock = folder / "lock.txt"
    lock.write_text(wheels_program.locked((REPOSITORY / "requirements/image.txt").read_text())["msgpack"])
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-cache-dir", "--no-deps", "--require-hashes"]
    python = ["--only-binary", ":all:", "--python-version", "3.11"]
    subprocess.run([*command, *python, "--dest", folder, "-r", lock], check=True)
    return next(folder.glob("msgpack-*.whl"))


@pytest.fixture
def context(tmp_path, plain_wheel, msgpack_wheel, wheels_program):
    """Copies what a build may see, with the wheels of an offline one; `more` goes into the plugin's wheel."""

    def make(*, architecture: int = 121, operators: str = OPERATORS, kernels: bool = True, tag: str = "",
             more: dict[str, bytes] | None = None) -> Path:  # fmt: skip
        folder = tmp_path / "context"
        for name in recipe.files(REPOSITORY):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
        (folder / ".env").write_text("VLLM_API_KEY=k3y-that-nobody-may-see\n")
        (folder / "tests").mkdir()
        (folder / "tests/test_x.py").write_text("")
        vendored = folder / "image/wheels"
        vendored.mkdir(parents=True)
        shutil.copy(msgpack_wheel, vendored)
        added = dict(more or {})
        if kernels:
            added["vllm_exl3/_kernels.so"] = small_base.kernels(tmp_path / "_kernels.so", architecture, operators)
        small_base.tagged_wheel(plain_wheel, vendored, tag or wheels_program.plugin_tag("12.1a"), added)
        return folder

    return make
