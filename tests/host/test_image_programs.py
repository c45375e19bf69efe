"""The programs of the image's build, as far as they go without one."""

import importlib.util
import re
import sys
import types

import pytest

from launcher.running_checks import PINS
from launcher.settings import REPOSITORY


def load(name: str) -> types.ModuleType:
    path = sys.path[:]
    spec = importlib.util.spec_from_file_location(f"image_{name}", REPOSITORY / f"image/{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


base, wheels = load("base"), load("wheels")
LOCK = (REPOSITORY / "requirements/image.txt").read_text()


def test_the_dockerfile_s_versions_are_the_pinned_ones():
    given = dict(re.findall(r"^ARG (\w+)=(\S+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE))
    pinned = {pin.package: pin.version for pin in PINS}
    assert (given["VLLM"], given["FLASHINFER"]) == (pinned["vllm"], pinned["flashinfer_python"])
    assert given["BASE"] == f"vllm/vllm-openai:v{given['VLLM']}"
    assert f"ray=={given['RAY']} " in LOCK and f"exllamav3=={given['EXLLAMAV3']} " in wheels.TOOLS_LOCK.read_text()
    assert given["EXLLAMAV3"] == wheels.EXLLAMAV3
    selfcheck = (REPOSITORY / "overlay/vllm_exl3/selfcheck.py").read_text()
    assert f'REQUIRED_ARCHITECTURE = "{given["CUDA_ARCHS"]}"' in selfcheck


def test_every_locked_package_has_hashes():
    for text in (LOCK, wheels.TOOLS_LOCK.read_text()):
        locked = wheels.locked(text)
        assert len(locked) >= 8
        assert all("--hash=sha256:" in lines for lines in locked.values())


def test_a_package_of_several_versions_is_one_entry():
    entries = ("a==1 ; x < '3'", "a==2 ; x >= '3'", "B_c==3")
    locked = wheels.locked("".join(f"{entry} \\\n    --hash=sha256:00\n" for entry in entries))
    assert set(locked) == {"a", "b-c"}
    assert locked["a"].count("--hash") == 2 and locked["a"].count("==") == 2


def test_only_what_the_base_lacks_is_installed_but_ray_is_always_the_locked_one():
    locked = wheels.locked(LOCK)
    has = dict.fromkeys(locked, "0.1")
    assert set(wheels.lacking(has, locked)) == {"ray"}
    assert set(wheels.lacking({**has, "ray": "2.60.0"}, locked)) == set()
    del has["msgpack"]
    assert set(wheels.lacking({**has, "ray": "2.60.0"}, locked)) == {"msgpack"}


@pytest.mark.parametrize("value", ["1.6.4", "", "no"])
def test_another_exllamav3_is_refused(value):
    with pytest.raises(wheels.WheelError, match="EXLLAMAV3: is"):
        wheels.Settings.read({"EXLLAMAV3": value})


def test_a_tag_belongs_to_sources_gpu_and_torch():
    tags = {
        wheels.plugin_tag("12.1a"), wheels.plugin_tag("9.0a"),
        *(wheels.extension_tag(arch, {"torch": torch}) for arch in ("12.1a", "9.0a") for torch in ("2.14.0", "2.11.0")),
    }  # fmt: skip
    assert len(tags) == 6 and all(re.fullmatch(r"0[0-9a-f]{15}", tag) for tag in tags)


def test_pip_is_constrained_to_the_base_but_for_what_is_ours():
    text = base.constraints({"torch": "2.14.0+cu130", "ray": "2.50.0", "vllm-exl3": "0.0.1"})
    assert text == "torch==2.14.0+cu130\n"


GOOD = {"vllm": "0.33.0+cu130", "flashinfer-python": "0.7.2.post1", "torch": "2", "transformers": "5", "pip": "25"}


def drop(name: str) -> dict[str, str]:
    return {known: version for known, version in GOOD.items() if known != name}


def test_changes_are_told_by_kind():
    assert base.changes({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}) == {
        "b": "changed", "c": "removed", "d": "added",
    }  # fmt: skip


@pytest.mark.parametrize(
    "packages, words",
    [({}, "vllm is missing"), (GOOD | {"vllm": "0.32.0"}, "vllm is 0.32.0, needed is 0.33.0"),
     *((drop(name), f"{name} is missing") for name in ("flashinfer-python", "torch", "transformers", "pip"))],
)  # fmt: skip
def test_a_base_without_what_is_needed_is_refused(monkeypatch, packages, words):
    monkeypatch.setenv("VLLM", "0.33.0")
    monkeypatch.setenv("FLASHINFER", "0.7.2.post1")
    base.check_needed(GOOD)
    with pytest.raises(base.BaseError, match=words):
        base.check_needed(packages)
