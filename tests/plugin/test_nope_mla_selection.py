"""Which geometry is chosen for which GPU, setting and FlashInfer, and what is refused in a sentence."""

import sys

import pytest
from mla_backend import TABLES, forget_flashinfer, write_flashinfer
from vllm_exl3 import switches
from vllm_exl3.nope_mla import geometry
from vllm_exl3.nope_mla.geometry import COMPACT, NATIVE, PADDED, Kernels, MlaGeometryError, applies, decide

NEW, OLD, OLDEST = TABLES


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a FlashInfer of one version importable and gives what is found of it."""

    def install(version: str) -> Kernels:
        forget_flashinfer()
        write_flashinfer(tmp_path / version, version)
        monkeypatch.syspath_prepend(tmp_path / version)
        return geometry.installed_kernels()

    yield install
    forget_flashinfer()


# GPUs


@pytest.mark.parametrize("capability", [(12, 0), (12, 1), None])  # None: no GPU that could be asked
@pytest.mark.parametrize("setting", switches.MLA_GEOMETRIES)
def test_sm12x_takes_the_geometries(setting, capability):
    assert applies(setting, capability)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_other_gpus_keep_vllms_own_backend(capability):
    assert not applies("auto", capability)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("setting", ["native", "padded", "compact"])
def test_a_geometry_for_another_gpu_is_refused(setting, capability):
    with pytest.raises(MlaGeometryError, match=rf"MLA_GEOMETRY is {setting}, .* {capability[0]}\.0: .*=auto"):
        applies(setting, capability)


# FlashInfer with and without the 512-wide kernel


@pytest.mark.parametrize("heads, wide", [(8, 8), (16, 16), (22, 32), (32, 32), (64, 64)])
@pytest.mark.parametrize(
    "setting, form", [("auto", NATIVE), ("native", NATIVE), ("padded", PADDED), ("compact", COMPACT)]
)
def test_new_flashinfer(installed, setting, form, heads, wide):
    choice = decide(setting, installed(NEW), heads, 2176, 2048)
    assert (choice.geometry, choice.heads, choice.candidates) == (form, wide, 2176)
    assert (NEW in choice.reason) == (form is NATIVE)


@pytest.mark.parametrize("setting", ["auto", "padded"])
def test_old_flashinfer_gets_padded_rows_and_2048_candidates(installed, setting):
    choice = decide(setting, installed(OLD), 22, 2176, 2048)
    assert (choice.geometry, choice.heads, choice.candidates) == (PADDED, 32, 2048)
    assert choice.reason in (
        "asked for", "FlashInfer 0.6.18 has no 512-wide kernel for 22 heads and 2176 candidates"
    )  # fmt: skip


@pytest.mark.parametrize("setting", ["native", "compact"])
def test_a_missing_512_wide_kernel_is_named(installed, setting):
    sentence = rf"{setting}: FlashInfer 0\.6\.18 has no 512-wide .* takes 16 heads and 2176 candidates; set .*auto"
    with pytest.raises(MlaGeometryError, match=sentence):
        decide(setting, installed(OLD), 16, 2176, 2048)


@pytest.mark.parametrize("setting", ["auto", "padded"])
def test_without_any_kernel_nothing_is_chosen(installed, setting):
    with pytest.raises(MlaGeometryError, match=r"0\.6\.0 has no 576-wide .* 2176 candidates or 2048; install"):
        decide(setting, installed(OLDEST), 16, 2176, 2048)


def test_more_heads_than_any_kernel_takes_are_refused(installed):
    with pytest.raises(MlaGeometryError, match="takes 129 heads"):
        decide("native", installed(NEW), 129, 2176, 2048)


def test_auto_is_never_compact():
    everything = type("Everything", (), {"__contains__": lambda self, pair: True})()
    for nope in (everything, None):
        assert decide("auto", Kernels("9.9", nope, everything), 16, 2176, 2048).geometry is not COMPACT


def test_a_missing_flashinfer_is_named(monkeypatch):
    forget_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(MlaGeometryError, match=r"flashinfer\.mla\._sparse_mla_sm120: .* needs FlashInfer"):
        geometry.installed_kernels()


# The settings


def test_settings_are_read():
    assert switches.parse({}).mla_geometry == "auto" and not switches.parse({"PDL": "0"}).pdl
    assert switches.parse({"MLA_GEOMETRY": " compact "}).mla_geometry == "compact" and switches.parse({"PDL": "1"}).pdl


@pytest.mark.parametrize("name, value", [("MLA_GEOMETRY", "wide"), ("PDL", "yes")])
def test_unknown_values_are_refused(name, value):
    with pytest.raises(switches.SwitchError, match=f"{name}: is '{value}', expected"):
        switches.parse({name: value})
