"""Which targets inside vLLM are replaced, and that changed targets are refused."""

import subprocess
import sys
from collections import Counter
from types import ModuleType

import pytest

pytest.importorskip("vllm")

from vllm_exl3 import after_import, glm5_next, overrides
from vllm_exl3.cpu import overrides as cpu_overrides
from vllm_exl3.cpu import torchvision_ops


def add(x):
    return x + 1


@pytest.fixture
def target():
    module = ModuleType("vllm.some_module")
    module.add = add
    return module


def override(**changed) -> overrides.Override:
    entry = dict(
        module="vllm.some_module", attribute="add", why="", until="",
        known=(overrides.fingerprint(add),), replace=lambda original: lambda x: original(x) * 10,
    )  # fmt: skip
    return overrides.Override(**entry | changed)


def run(code: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_known_target_is_replaced(target):
    overrides.apply(override(), target)
    assert target.add(1) == 20


@pytest.mark.parametrize("other", [lambda x: x - 1, eval("lambda x: x - 1")])  # the latter has no source
def test_a_changed_target_is_refused_by_name(target, other):
    target.add = other
    with pytest.raises(RuntimeError, match=r"vllm\.some_module:add of vLLM .* is not what .* fingerprint"):
        overrides.apply(override(), target)
    assert target.add is other


def test_a_missing_target_is_refused_by_name(target):
    with pytest.raises(RuntimeError, match=r"vllm\.some_module:Layer\.forward .* there is no Layer"):
        overrides.apply(override(attribute="Layer.forward"), target)


CHANGED_TARGET = """
import vllm.model_executor.layers.mhc as mhc
mhc.MHCPreOp.forward_cpu = lambda self, *args: None
from vllm_exl3 import cpu
cpu.install()
"""


def test_a_vllm_with_a_changed_target_does_not_start():
    done = run(CHANGED_TARGET)
    assert done.returncode != 0
    assert "RuntimeError: vllm.model_executor.layers.mhc:MHCPreOp.forward_cpu of vLLM" in done.stderr


EVERY_TARGET = """
import importlib
from vllm_exl3 import after_import, cpu, glm5_next, overrides
from vllm_exl3.cpu.overrides import TABLE
for _ in range(2):
    cpu.install()
    glm5_next.install()
for entry in TABLE + glm5_next.TABLE:
    value = importlib.import_module(entry.module)
    for name in entry.attribute.split("."):
        value = getattr(value, name)
    code = getattr(value, "__code__", None) or type(value)
    wraps = 0
    while hasattr(value, "__wrapped__"):
        value, wraps = value.__wrapped__, wraps + 1
    print(entry.name, overrides.fingerprint(value) in entry.known, wraps)
print("pending", after_import._finder.actions)
"""


DECORATED_BY_VLLM = Counter(["vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights"])


def test_every_target_of_this_vllm_is_known_and_replaced_once():
    done = run(EVERY_TARGET)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("vllm.", "pending"))]
    table = cpu_overrides.TABLE + glm5_next.TABLE
    assert len(lines) == len(table) + 1 and lines[-1] == "pending {}"
    times = Counter(entry.name for entry in table) + DECORATED_BY_VLLM
    for entry, line in zip(table, lines, strict=False):
        name, is_original, wraps = line.split()
        # A wrapper keeps the original below it, once for each entry; any other replacement is not the original.
        assert name == entry.name and (is_original, wraps) in {("True", str(times[name])), ("False", "0")}


def test_installation_loads_no_model():
    done = run("from vllm_exl3 import cpu; cpu.install(); import sys; print('vllm.models.glm5next' in sys.modules)")
    assert done.returncode == 0 and done.stdout.strip().endswith("False"), done.stderr


def test_an_action_runs_once_after_the_import(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    after_import.after_import("late_module", lambda module: seen.append(module.value))
    assert seen == []
    import late_module

    assert seen == [1]
    after_import.after_import("late_module", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2] and late_module.value == 1


def test_an_error_in_an_action_stops_the_import(tmp_path, monkeypatch):
    (tmp_path / "refused_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def refuse(module):
        raise RuntimeError("changed")

    after_import.after_import("refused_module", refuse)
    with pytest.raises(RuntimeError, match="changed"):
        import refused_module  # noqa: F401


@pytest.mark.parametrize("module", ["vllm.entrypoints.openai.api_server", "vllm.v1.engine.core"])
def test_torchvision_imports_in_vllms_processes(module):
    """vLLM imports transformers, and that torchvision, long before it loads general plugins."""
    done = run(f"import {module}, sys, torchvision; print('ok', torchvision.__version__)")
    assert done.returncode == 0 and "ok" in done.stdout, done.stderr[-2000:]


def test_a_working_torchvision_keeps_its_own_operators(monkeypatch):
    monkeypatch.setattr(torchvision_ops, "_library", None)
    extension = ModuleType("torchvision.extension")
    extension._has_ops = lambda: True
    torchvision_ops._define_missing_operators(extension)
    assert torchvision_ops._library is None
