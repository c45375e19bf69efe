"""NoPE MLA on a GPU that is no SM12x: the writers byte by byte, and vLLM's own classes as far as they go there.

PYTHONPATH=overlay:.:SITE python3 tests/gpu/check_nope_mla.py     # SITE: a folder with vLLM 0.33.0; or check names

The capability is faked, so that vLLM and FlashInfer choose as on a DGX Spark. FlashInfer's kernel itself is code for
SM12x and does not run elsewhere: it is replaced by PyTorch that reads the same bytes.
"""

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

os.environ.setdefault("MLA_GEOMETRY", "auto")
sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))

import torch
from mla_backend import Attention, Step, make_impl, vllm_config
from mla_rows import LATENT, PAYLOAD, ROPE, ROPED, Pool, relative_error
from vllm_exl3 import switches
from vllm_exl3.nope_mla import rows
from vllm_exl3.nope_mla.write_rows import write_rows

DEVICE = "cuda"
FORMS = ("native", "padded", "compact")
BLOCKS, BLOCK, GAP = 40, 64, 7


def tell(line: str) -> None:
    print(f"  {line}", flush=True)


def latents(tokens: int) -> torch.Tensor:
    """Over nine decades, with zeros, and nearly the largest and least normal numbers."""
    generator = torch.Generator().manual_seed(tokens)
    values = torch.randn(tokens, LATENT, generator=generator) * torch.logspace(-6, 3, tokens)[:, None]
    values[0], values[1, 7], values[2, :128] = 0, 3e38, 2e-38
    return values.bfloat16()


def slots(tokens: int) -> torch.Tensor:
    chosen = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(5))[:tokens]
    chosen[3::50] = -1
    return chosen


def on_gpu(pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
    """(all bytes, the view of the cache) of a copy on the GPU."""
    memory = pool.bytes.to(DEVICE, copy=True)
    return memory, memory.as_strided(pool.view.shape, pool.view.stride())


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    return int((got.cpu() != want.cpu()).sum())


# Writers


def check_triton_writer_against_the_reference() -> None:
    """Every byte of the pool, those that must not change included."""
    for tokens in (1, 3, 64, 1000, 2000):
        pool = Pool(BLOCKS, PAYLOAD, gap=GAP, seed=2)
        memory, cache = on_gpu(pool)
        latent, where = latents(max(tokens, 3))[:tokens], slots(tokens)
        write_rows(latent.to(DEVICE), cache, where.to(DEVICE))
        pool.write(latent, where)
        wrong = differing(memory, pool.bytes)
        assert wrong == 0, f"{tokens} tokens: {wrong} bytes differ"
    tell("1 to 2,000 tokens, blocks with gaps: every byte equal")


def check_triton_writer_takes_a_slice_of_a_wider_row() -> None:
    """The latent comes as columns of the fused projection's output."""
    pool, wide = Pool(BLOCKS, PAYLOAD, gap=GAP, seed=2), torch.randn(100, 2112).bfloat16()
    memory, cache = on_gpu(pool)
    where = slots(100)
    write_rows(wide.to(DEVICE)[:, 1536:2048], cache, where[:90].to(DEVICE))
    pool.write(wide[:90, 1536:2048], where[:90])
    wrong = differing(memory, pool.bytes)
    assert wrong == 0, f"{wrong} bytes differ"


def check_triton_writer_against_vllms() -> None:
    """The payload of vLLM's own 656-byte rows, and zeros behind it, with rotary columns of zeros and with none."""
    from vllm import _custom_ops as ops

    latent, where = latents(2000), slots(2000)
    _, cache = on_gpu(Pool(BLOCKS, PAYLOAD, gap=GAP, seed=2))
    write_rows(latent.to(DEVICE), cache, where.to(DEVICE))
    kept = where[where >= 0]
    ours = cache[kept // BLOCK, kept % BLOCK]
    for columns in (ROPE, 0):
        pool = Pool(BLOCKS, ROPED, gap=GAP, seed=2)
        memory, upstream = on_gpu(pool)
        rope = torch.zeros(2000, columns, dtype=torch.bfloat16, device=DEVICE)
        scale = torch.ones(1, device=DEVICE)
        ops.concat_and_cache_mla(latent.to(DEVICE), rope, upstream, where.to(DEVICE), "fp8_ds_mla", scale)
        theirs = upstream[kept // BLOCK, kept % BLOCK]
        wrong = (ours != theirs[:, :PAYLOAD]).cpu()
        behind = int((theirs[:, PAYLOAD:] != 0).sum())
        pool.write(latent, where, torch.zeros(2000, ROPE).bfloat16())
        rest = differing(memory, pool.bytes)
        tell(
            f"{columns} rotary columns: {int(wrong[:, :LATENT].sum())} values and {int(wrong[:, LATENT:].sum())} bytes "
            f"of scales differ, {behind} bytes behind the payload are not zero, {rest} of the pool are not as expected"
        )
        assert not wrong.any() and behind == 0 and rest == 0


# CUDA graphs


def check_graph() -> None:
    """All of the geometries' steps but the kernel, captured once, replayed with other data."""
    latent = torch.randn(64, LATENT, device=DEVICE).bfloat16()
    where = torch.arange(64, device=DEVICE)
    query, candidates = torch.randn(64, 22, LATENT, device=DEVICE).bfloat16(), narrowable(64)
    logits, pools = torch.randn(64, 900, device=DEVICE), torch.arange(512, device=DEVICE).repeat(64, 1).int()
    _, cache = on_gpu(Pool(BLOCKS, PAYLOAD, gap=GAP, seed=2))
    _, eager_cache = on_gpu(Pool(BLOCKS, PAYLOAD, gap=GAP, seed=2))

    def step(cache, pools):
        write_rows(latent, cache, where)
        rows.put_lowest_last(logits, pools)
        narrow = rows.fit_candidates(candidates, 2048, 4)
        wide = rows.widen_query(query, 32, 576)
        rows.zero_empty(wide, narrow)
        return narrow, wide

    step(eager_cache, pools.clone())
    graph, captured = torch.cuda.CUDAGraph(), pools.clone()
    with torch.cuda.graph(graph):
        got = step(cache, captured)
    latent.copy_(torch.randn(64, LATENT).bfloat16())
    where.copy_(torch.arange(64) + 640)
    candidates.copy_(narrowable(64, seed=1))
    logits.copy_(torch.randn(64, 900))
    captured.copy_(pools)
    graph.replay()
    want_pools = pools.clone()
    want = step(eager_cache, want_pools)
    cache[0], eager_cache[0] = 0, 0  # the capture itself wrote nothing there, the eager call did
    assert all(torch.equal(a, b) for a, b in zip((*got, captured), (*want, want_pools), strict=True))
    assert torch.equal(cache, eager_cache)


def narrowable(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 5000, (tokens, 2176), generator=generator).int()
    found[:, 2051:] = -1
    found[::2, 2048:] = -1
    found[5] = -1
    return found.to(DEVICE)


# vLLM and FlashInfer with a faked capability


@contextlib.contextmanager
def spark(setting: str):
    """vLLM and FlashInfer see capability 12.1, and the plugin is registered with this MLA_GEOMETRY."""
    import flashinfer.mla._core as core
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm_exl3 import nope_mla
    from vllm_exl3.nope_mla import backend

    with (
        mock.patch.object(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(12, 1)),
        mock.patch.object(core, "get_compute_capability", lambda device: (12, 1)),
        mock.patch.object(core, "is_sm12x_supported", lambda device: True),
        mock.patch.dict(os.environ, {"MLA_GEOMETRY": setting}),
    ):
        for cached in (switches.switches, backend.choose):
            cached.cache_clear()
        nope_mla.install()
        try:
            yield backend
        finally:
            AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120.clear_override()


def check_vllm_selects_our_class() -> None:
    """The platform's own choice for NoPE sparse MLA at 12.1, then the cache spec that it asks our class for."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.kv_cache_interface import MLAAttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    for setting, row in (("auto", 656), ("padded", 656), ("compact", 528)):
        with spark(setting) as backend, vllm_config(DEVICE):
            wanted = AttentionSelectorConfig(512, torch.bfloat16, "auto", None, use_mla=True, use_sparse=True)
            chosen = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(None, wanted, 32))
            assert chosen is backend.NopeMlaBackend, chosen
            spec = MLAAttentionSpec(
                block_size=4352, num_kv_heads=1, head_size=512, dtype=torch.uint8, state_content_bytes=656
            )  # fmt: skip
            made = customize_attention_spec(chosen, spec)
            assert (made.state_content_size_bytes, made.block_stride_alignment) == (row, 64 * row)
            tell(f"{setting}: {chosen.__name__}, {row} bytes a row, page {made.page_size_bytes}")


def check_the_installed_flashinfer_is_understood() -> None:
    from vllm_exl3.nope_mla import geometry

    kernels = geometry.installed_kernels()
    for heads in (8, 16, 22, 32, 64):
        said = [geometry.decide(setting, kernels, heads, 2176, 2048) for setting in ("auto", "padded", "compact")]
        assert [choice.geometry.name for choice in said] == ["native", "padded", "compact"]
        assert {choice.candidates for choice in said} == {2176} and len({choice.heads for choice in said}) == 1
        tell(f"FlashInfer {kernels.version}, {heads} heads: {said[0].geometry.name}, {said[0].heads} in the kernel")


def check_a_step_through_vllms_classes() -> None:
    """Real writers and vLLM's real index kernel; FlashInfer's kernel in PyTorch. Same bits in all three geometries."""
    import vllm.utils.flashinfer as flashinfer

    for heads in (16, 22, 32):
        got = {}
        for form in FORMS:
            attention = Attention()
            with (
                spark(form) as backend,
                vllm_config(DEVICE),
                mock.patch.object(flashinfer, "flashinfer_trtllm_batch_decode_with_kv_cache_mla", attention),
            ):
                step = Step(form, heads, DEVICE)
                got[form] = step.run(make_impl(backend.NopeMlaImpl, heads, device=DEVICE))
            error = relative_error(got[form].float(), step.oracle())
            tell(f"{heads} heads, {form}: the kernel gets {attention.calls[0][0].shape[2]}, L2 to float64 {error:.1e}")
            assert error <= 4e-3 and (got[form][2] == 0).all()
        assert torch.equal(got["native"], got["padded"]) and torch.equal(got["native"], got["compact"])


class Stopped(Exception):
    """FlashInfer wants its compiled module: everything before it has been passed."""


def check_where_flashinfer_stops() -> None:
    """FlashInfer's own checks accept what each geometry passes; the next thing would be code for SM12x."""
    import flashinfer.mla._sparse_mla_sm120._execution as execution

    def stop():
        raise Stopped

    for heads in (16, 22):
        for form in FORMS:
            with (
                spark(form) as backend,
                vllm_config(DEVICE),
                mock.patch.object(execution, "get_sparse_mla_sm120_module", stop),
            ):
                impl = make_impl(backend.NopeMlaImpl, heads, device=DEVICE)
                try:
                    Step(form, heads, DEVICE).run(impl)
                    raise AssertionError("FlashInfer answered without its module")
                except Stopped as stopped:
                    way = [frame.name for frame in traceback.extract_tb(stopped.__traceback__)]
                tell(f"{heads} heads, {form}: stops where the kernels' module is needed, in {' > '.join(way[-4:-1])}")


def main(names: list[str]) -> int:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    failed = []
    for name in names or [name for name in globals() if name.startswith("check_")]:
        start, outcome = time.perf_counter(), "PASS"
        try:
            globals()[name]()
        except Exception as error:
            traceback.print_exc(limit=-3)
            outcome = f"FAIL {type(error).__name__}: {(str(error).strip().splitlines() or ['-'])[-1]}"
            failed.append(name)
        title = name.removeprefix("check_").replace("_", " ")
        print(f"{title}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"FAIL: {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
