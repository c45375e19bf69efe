"""The warm-up: every step is tried, and what failed is named."""

import importlib
import types

import pytest
from vllm_exl3 import warm_up


class Spec:
    is_aot = False
    is_compiled = False
    built = 0

    def build(self):
        self.built += 1


@pytest.mark.parametrize(
    "state, said, built",
    [({}, "compiled", 1), ({"is_aot": True}, "came compiled", 0), ({"is_compiled": True}, "was compiled before", 0)],
)
def test_a_module_is_compiled_once(monkeypatch, state, said, built):
    spec = type("Known", (Spec,), state)()
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(make=lambda: spec))
    assert warm_up.build_module("flashinfer.jit.any", "make") == said
    assert spec.built == built


def fail():
    raise RuntimeError("nvcc is not there")


def test_every_step_is_tried_and_failures_are_named(monkeypatch, capsys):
    monkeypatch.setattr(warm_up, "steps", lambda: {"first": fail, "second": lambda: "compiled"})
    assert warm_up.main() == 1
    said = capsys.readouterr()
    assert "first: failed: RuntimeError: nvcc is not there" in said.out and "second: compiled (0 s)" in said.out
    assert "warm_up: first could not be compiled" in said.err
    monkeypatch.setattr(warm_up, "steps", lambda: {"second": lambda: "compiled"})
    assert warm_up.main() == 0
