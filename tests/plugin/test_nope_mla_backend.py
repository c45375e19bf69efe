"""The backend inside vLLM's own classes, on the CPU: registration, cache layout, writing, attending, refusals.

CI has vLLM 0.32.0. The same tests pass with 0.33.0's files: PYTHONPATH=overlay:DIR/with/vllm pytest THIS_FILE
"""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.platforms
from mla_backend import (
    TABLES,
    Attention,
    Step,
    concat_and_cache_mla,
    forget_flashinfer,
    make_impl,
    to_global,
    vllm_config,
    write_compact,
    write_flashinfer,
)  # fmt: skip
from mla_rows import LATENT, relative_error

if vllm.platforms.current_platform.is_unspecified():  # files without the package's metadata
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()

import vllm_exl3.nope_mla as nope_mla
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm_exl3 import overrides, pdl, switches
from vllm_exl3.nope_mla import backend, seams
from vllm_exl3.nope_mla.geometry import MlaGeometryError

SM120 = AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120
NEW, OLD, _ = TABLES
FORMS = ("native", "padded", "compact")


@pytest.fixture(autouse=True)
def clean():
    """Nothing chosen or registered before or after; one thread, since the tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    SM120.clear_override()
    for cached in (backend.choose, switches.switches):
        cached.cache_clear()
    forget_flashinfer()


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """Sets MLA_GEOMETRY and the FlashInfer that is installed."""

    def choose(setting: str = "auto", version: str = NEW) -> None:
        monkeypatch.setenv("MLA_GEOMETRY", setting)
        for cached in (backend.choose, switches.switches):
            cached.cache_clear()
        forget_flashinfer()
        if not (tmp_path / version).exists():
            write_flashinfer(tmp_path / version, version)
        monkeypatch.syspath_prepend(tmp_path / version)

    return choose


@pytest.fixture
def gpu(monkeypatch):
    """Gives the platform a GPU of some capability."""

    def gpu(*capability: int) -> None:
        platform = vllm.platforms.current_platform
        monkeypatch.setattr(platform, "get_device_capability", lambda device_id=0: DeviceCapability(*capability))

    return gpu


@pytest.fixture
def kernels(monkeypatch) -> Attention:
    """Stand-ins for the CUDA kernels."""
    import vllm._custom_ops
    import vllm.utils.flashinfer as flashinfer
    import vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 as upstream

    attention = Attention()
    monkeypatch.setattr(flashinfer, "has_flashinfer_sparse_mla_sm120", lambda: True)
    monkeypatch.setattr(flashinfer, "flashinfer_trtllm_batch_decode_with_kv_cache_mla", attention)
    monkeypatch.setattr(upstream, "triton_convert_req_index_to_global_index", to_global)
    monkeypatch.setattr(vllm._custom_ops, "concat_and_cache_mla", concat_and_cache_mla)
    monkeypatch.setattr(backend, "write_rows", write_compact)
    return attention


@pytest.fixture(scope="module")
def config():
    with vllm_config() as config:
        yield config


# Registration


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_an_sm12x_gets_our_class_under_vllms_name(choose, gpu, capability):
    choose()
    gpu(*capability)
    for _ in range(2):
        nope_mla.install()
    assert SM120.is_overridden() and SM120.get_class() is backend.NopeMlaBackend
    assert backend.NopeMlaBackend.get_name() == "FLASHINFER_MLA_SPARSE_SM120"
    assert backend.NopeMlaBackend.get_impl_cls() is backend.NopeMlaImpl


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_other_gpus_keep_vllms_class(choose, gpu, capability):
    choose()
    gpu(*capability)
    nope_mla.install()
    assert not SM120.is_overridden()


def test_a_geometry_on_another_gpu_stops_the_registration(choose, gpu):
    choose("compact")
    gpu(9, 0)
    with pytest.raises(MlaGeometryError, match=r"MLA_GEOMETRY is compact, but this GPU has capability 9\.0"):
        nope_mla.install()


def test_a_backend_of_a_third_plugin_is_not_replaced(choose, gpu):
    from vllm.v1.attention.backends.registry import register_backend

    choose()
    gpu(12, 1)
    register_backend(SM120, "somebody.else.Backend")
    with pytest.raises(RuntimeError, match=r"SM120 is already replaced by somebody\.else\.Backend; remove"):
        nope_mla.install()


REGISTER = """
import sys, vllm.platforms
from vllm.platforms.interface import DeviceCapability
platform = vllm.platforms.current_platform
platform.is_cpu = lambda: False
platform.get_device_capability = lambda device_id=0: DeviceCapability(12, 1)
import vllm_exl3
vllm_exl3.register()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_exl3 import after_import
print(AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120.get_path())
print("vllm.platforms.cuda" in after_import._finder.actions)
print([name for name in sys.modules if "flashinfer_mla_sparse" in name or name == "vllm_exl3.nope_mla.backend"])
"""


def test_the_plugins_entry_point_registers_it_and_imports_no_backend():
    done = subprocess.run([sys.executable, "-c", REGISTER], capture_output=True, text=True, timeout=170)
    assert done.stdout.splitlines()[-3:] == ["vllm_exl3.nope_mla.backend.NopeMlaBackend", "True", "[]"], done.stderr


def test_the_upstream_classes_are_those_that_ours_extend():
    overrides.require(seams.TABLE)


def test_a_changed_upstream_class_is_named(monkeypatch):
    import vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 as upstream

    changed = type("FlashInferMLASparseSM120Impl", (), {})
    monkeypatch.setattr(upstream, "FlashInferMLASparseSM120Impl", changed)
    sentence = r"sm120:FlashInferMLASparseSM120Impl of vLLM .* is not what .* because the NoPE MLA backend extends it"
    with pytest.raises(RuntimeError, match=sentence):
        overrides.require(seams.TABLE)


# The cache


def spec(head_size: int = LATENT) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=4352, num_kv_heads=1, head_size=head_size, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )  # fmt: skip


@pytest.mark.parametrize("setting, bytes_", [("auto", 656), ("native", 656), ("padded", 656), ("compact", 528)])
def test_bytes_per_token_and_alignment(choose, setting, bytes_):
    choose(setting)
    made = backend.NopeMlaBackend.customize_spec(spec())
    assert made.state_content_size_bytes == bytes_ and made.block_stride_alignment == 64 * bytes_
    assert made.page_size_bytes == 4352 * bytes_


def test_a_model_with_rotary_columns_keeps_its_rows(choose):
    choose("compact")
    assert backend.NopeMlaBackend.customize_spec(spec(576)).state_content_size_bytes == 656


# The way of a step through vLLM's own forward_mqa


@pytest.mark.parametrize("heads, wide", [(16, 16), (22, 32)])
def test_every_geometry_answers_with_the_same_bits(choose, config, kernels, heads, wide):
    got = {}
    for form in FORMS:
        choose(form)
        impl, step = make_impl(backend.NopeMlaImpl, heads), Step(form, heads)
        got[form] = step.run(impl)
        query, cache, rows = kernels.calls[-1]
        assert impl.choice.geometry.name == form and query.shape[2:] == (wide, 576 if form == "padded" else 512)
        assert cache.shape[2:] == (64, impl.choice.geometry.row_bytes) and rows.shape[2] == 2176
        assert got[form].shape == (3, heads, LATENT) and got[form].is_contiguous()
        assert relative_error(got[form].float(), step.oracle()) <= 4e-3
        assert (got[form][2] == 0).all()
    assert torch.equal(got["native"], got["padded"]) and torch.equal(got["native"], got["compact"])


def test_native_is_what_vllm_does_by_itself(choose, config, kernels):
    from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 import FlashInferMLASparseSM120Impl

    choose("native")
    ours, theirs = (
        Step("native", 16).run(make_impl(cls, 16)) for cls in (backend.NopeMlaImpl, FlashInferMLASparseSM120Impl)
    )
    assert torch.equal(ours, theirs)


def test_padded_rows_that_kept_their_garbage_are_seen(choose, config, kernels, monkeypatch):
    choose("padded")
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda self, *size: torch.full(size, float("nan"), dtype=self.dtype))
    step = Step("padded", 16)
    got = step.run(make_impl(backend.NopeMlaImpl, 16))
    assert relative_error(got.float(), step.oracle()) > 0.1


def test_an_old_flashinfer_gets_2048_candidates_with_the_tail(choose, config, kernels, monkeypatch):
    installed = []
    monkeypatch.setattr(overrides, "install", installed.append)
    choose("auto", OLD)
    impl, step = make_impl(backend.NopeMlaImpl, 16), Step("padded", 16)
    got = step.run(impl)
    narrow = torch.cat([step.candidates[:, :2044], step.candidates[:, 2048:2052]], dim=1)
    narrow[1] = step.candidates[1, :2048]
    assert kernels.calls[-1][2].shape[2] == 2048 and installed == [seams.RANKED_POOLS]
    assert relative_error(got.float(), step.oracle(narrow)) <= 4e-3
    assert {4096, 4097, 4098} <= set(narrow[0].tolist())


def test_pools_are_ranked_after_vllms_own_merge():
    seen = []
    merge = seams.rank_pools(lambda *args, **named: seen.append((args, named)))
    logits, pools = torch.tensor([[4.0, 1.0, 3.0]]), torch.tensor([[1, 2, 0]], dtype=torch.int32)
    merge(logits, pools, 3, 0, 1, 1, row_starts=None)
    assert pools[0, -1] == 1 and sorted(pools[0].tolist()) == [0, 1, 2]
    assert seen == [((logits, pools, 3, 0, 1, 1), {"row_starts": None})]


def test_the_indexers_merge_is_the_one_that_is_wrapped():
    """It follows both of the indexer's top-k calls, of prompts and of answers. (The module itself needs a GPU.)"""
    import vllm.model_executor.layers.sparse_attn_indexer as indexer

    (entry,) = seams.RANKED_POOLS
    assert overrides.fingerprint(indexer._merge_dcp_topk_global) in entry.known
    source = Path(vllm.__path__[0]).joinpath(*entry.module.split(".")[1:]).with_suffix(".py").read_text()
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    merges = [call for call in calls if call.startswith(f"{entry.attribute}(logits, topk_dst, select_k")]
    assert len(merges) == 2 and "get_indexer_topk(topk_backend)(logits, seq_lens, next_n, topk_dst" in str(calls)


def test_a_model_with_rotary_columns_is_vllms_own_business(choose, config, kernels):
    choose("compact")
    assert make_impl(backend.NopeMlaImpl, 16, rope=64).choice is None


def test_the_choice_is_said_once_with_its_reason(choose, config, kernels, monkeypatch):
    said = []
    monkeypatch.setattr(backend.logger, "info", lambda message, *values, **named: said.append(message % values))
    choose("auto", OLD)
    monkeypatch.setattr(overrides, "install", lambda table: None)
    for _ in range(3):
        make_impl(backend.NopeMlaImpl, 22)
    assert said == [
        "exl3: MLA geometry padded (FlashInfer 0.6.18 has no 512-wide kernel for 22 heads and 2176 candidates): 656 "
        "bytes per token and layer, queries 576 wide, 22 heads padded to 32, the lowest-ranked pool gives way to the "
        "recent tail, 2048 candidates in all"
    ]


def test_a_missing_kernel_stops_the_model(choose, config, kernels):
    choose("native", OLD)
    with pytest.raises(MlaGeometryError, match=r"geometry native: FlashInfer 0\.6\.18 has no 512-wide"):
        make_impl(backend.NopeMlaImpl, 16)


@pytest.mark.parametrize(
    "section, field, value, said",
    [
        ("parallel_config", "decode_context_parallel_size", 2, "decode context parallelism"),
        ("", "kv_transfer_config", object(), "a KV connector"),
    ],
)
@pytest.mark.parametrize("setting, version, form", [("compact", NEW, "compact"), ("auto", OLD, "padded with 2048")])
def test_what_moves_rows_is_refused(
    choose, config, kernels, monkeypatch, section, field, value, said, setting, version, form
):
    choose(setting, version)
    monkeypatch.setattr(getattr(config, section) if section else config, field, value)
    with pytest.raises(MlaGeometryError, match=rf"MLA geometry {form} .*together with {said} .*; set MLA_GEO"):
        make_impl(backend.NopeMlaImpl, 16)


def test_hisparse_is_refused_with_compact_rows(config, monkeypatch):
    monkeypatch.setattr(config.attention_config, "hisparse_config", object())
    with pytest.raises(MlaGeometryError, match="together with HiSparse"):
        backend.refuse_row_movers("compact", config)


# Programmatic dependent launch


def test_pdl_is_off_on_sm12x_unless_asked_for(gpu, monkeypatch):
    installed = []
    monkeypatch.setattr(overrides, "install", installed.append)
    for capability, setting, expected in (((12, 1), "0", [pdl.TABLE]), ((12, 1), "1", []), ((9, 0), "0", [])):
        installed.clear()
        monkeypatch.setenv("PDL", setting)
        switches.switches.cache_clear()
        gpu(*capability)
        pdl.install()
        assert installed == expected


def test_vllms_own_question_about_pdl_is_answered_no(monkeypatch):
    for compiled in ("vllm._C", "vllm._C_stable_libtorch"):  # of a CUDA build; the platform only registers them
        monkeypatch.setitem(sys.modules, compiled, sys.modules.get(compiled, ModuleType(compiled)))
    import vllm.platforms.cuda as cuda

    (entry,) = pdl.TABLE
    holder, original = overrides.check(entry, cuda)
    monkeypatch.setattr(holder, "is_arch_support_pdl", entry.replace(original))
    assert cuda.CudaPlatform.is_arch_support_pdl() is False
