"""vLLM's real sparse MLA classes for SM12x with stand-ins for the three CUDA kernels that they call.

The stand-ins take what vLLM passes them, refuse what the kernels refuse, and read and write the same bytes.
"""

import contextlib
import socket
import sys
import textwrap
from types import SimpleNamespace

import torch
from mla_rows import (
    LATENT,
    PAYLOAD,
    ROPE,
    ROPED,
    Kernel,
    Pool,
    causal_candidates,
    global_rows,
    oracle,
    pooled_candidates,
    quantise,
)

# FlashInfer's own tables of what its kernels take, by version: those of 0.7.2.post1 are predicates.
TABLES = {
    "0.7.2.post1": """
        class Envelope:
            def __contains__(self, pair):
                return 1 <= pair[0] <= 128 and pair[1] >= 1
        _DECODE_GLM53_NOPE_DISPATCH = Envelope()
        _DECODE_DSV3_2_DISPATCH = Envelope()
    """,
    "0.6.18": """
        _DECODE_DSV3_2_DISPATCH = frozenset(
            (heads, topk) for heads in (8, 16, 32, 64, 128) for topk in (128, 512, 1024, 2048)
        )
    """,
    "0.6.0": "",
}
MODEL = SimpleNamespace(model_type="glm5_next_text", index_topk=2048, index_kpool=4)


def write_flashinfer(folder, version: str) -> None:
    """A package with the tables of that version and nothing else, for `folder` on sys.path."""
    package = folder / "flashinfer"
    (package / "mla").mkdir(parents=True)
    for file in (package / "__init__.py", package / "mla/__init__.py"):
        file.write_text("")
    (package / "mla/_sparse_mla_sm120.py").write_text(textwrap.dedent(TABLES[version]))
    info = folder / f"flashinfer_python-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n")


def forget_flashinfer() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


class Memory:
    """The bytes of a cache tensor from its first one on, as a kernel that is given its address sees them."""

    def __init__(self, cache: torch.Tensor) -> None:
        assert cache.dtype == torch.uint8 and cache.stride(-1) == 1
        self.row_bytes = cache.stride(-2)
        start = cache.storage_offset()
        whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        self.bytes = whole[start:].cpu()


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, skip_scale=False) -> None:
    """vLLM's writer of 656-byte rows."""
    assert kv_cache_dtype == "fp8_ds_mla" and kv_cache.shape[2] == ROPED and kv_c.shape[1] == LATENT
    assert k_pe.dim() == 2 and k_pe.shape[1] in (0, ROPE), "pe_dim must be 64 or 0"
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            data, scales = quantise(kv_c[token : token + 1])
            row = kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]]
            row[:PAYLOAD] = torch.cat([data, scales.view(torch.uint8)], dim=1)[0]
            if k_pe.shape[1]:
                row[PAYLOAD:] = k_pe[token].view(torch.uint8)


def write_compact(latent, cache, slots) -> None:
    """write_rows.write_rows without Triton."""
    assert cache.shape[2] == PAYLOAD and cache.stride(1) == PAYLOAD
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            data, scales = quantise(latent[token : token + 1])
            row = torch.cat([data, scales.view(torch.uint8)], dim=1)[0]
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row


def to_global(req_id, block_table, token_indices, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=None, NUM_TOPK_TOKENS=2048, **_):
    """vLLM's index kernel."""
    assert token_indices.shape[1] == NUM_TOPK_TOKENS
    safe = token_indices.clamp_min(0).long()
    block = block_table[req_id.long()].gather(1, safe // BLOCK_SIZE)
    return torch.where(token_indices >= 0, block * (BLOCK_STRIDE_ROWS or BLOCK_SIZE) + safe % BLOCK_SIZE, -1).int()


class Attention:
    """FlashInfer's entry point. Keeps the calls."""

    def __init__(self, heads=(8, 16, 32, 64, 128)) -> None:
        self.heads, self.calls = heads, []

    def __call__(self, *, query, kv_cache, block_tables, out, bmm1_scale, kv_scale_format, sparse_mla_top_k, **rest):
        rope = rest["qk_rope_head_dim"]
        assert query.dtype == torch.bfloat16 and query.shape[3] == LATENT + rope and rope in (0, ROPE)
        assert query.shape[2] in self.heads, f"no kernel for {query.shape[2]} heads"
        assert kv_cache.shape[1] == 1 and kv_cache.shape[3] >= (ROPED if rope else PAYLOAD)
        assert kv_cache.stride(2) % 16 == 0 and kv_cache.stride(0) == kv_cache.shape[2] * kv_cache.stride(2)
        assert tuple(block_tables.shape) == (len(query), 1, sparse_mla_top_k) and block_tables.is_contiguous()
        assert kv_scale_format == "arbitrary_fp32" and out.shape == (*query.shape[:3], LATENT)
        self.calls.append((query, kv_cache, block_tables))
        kernel, memory = Kernel(rope=rope > 0), Memory(kv_cache)
        out[:, 0] = kernel.attend(query[:, 0].cpu(), memory, block_tables[:, 0].cpu(), bmm1_scale)[0].to(out.device)
        return out


@contextlib.contextmanager
def vllm_config(device: str = "cpu"):
    """A real VllmConfig of one rank, with the few fields of the model that the classes read."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    config = VllmConfig(device_config=DeviceConfig(device))
    config.model_config = SimpleNamespace(
        is_moe=False, hf_text_config=MODEL, get_num_attention_heads=lambda parallel_config: 16
    )
    with set_current_vllm_config(config), socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1)
        try:
            yield config
        finally:
            cleanup_dist_env_and_memory()


def make_impl(cls, heads: int, *, rope: int = 0, width: int = 2176, tokens: int = 8, device: str = "cpu"):
    """An attention implementation of GLM-5.3-Flash's shapes; inside `vllm_config`."""
    candidates = torch.full((tokens, width), -1, dtype=torch.int32, device=device)
    return cls(
        heads, LATENT + rope, 256**-0.5, 1, None, None, "fp8_ds_mla", None, "decoder", None,
        q_lora_rank=1536, kv_lora_rank=LATENT, qk_nope_head_dim=256, qk_rope_head_dim=rope, qk_head_dim=256 + rope,
        v_head_dim=256, kv_b_proj=None, topk_indices_buffer=candidates,
    )  # fmt: skip


class Step:
    """One step through vLLM's forward_mqa: a sequence in recycled blocks of a cache with other layers' pages between
    its blocks, and three queries, the last without candidates."""

    LENGTH, BLOCK = 4099, 64

    def __init__(self, form: str, heads: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(heads)
        self.device, blocks = device, -(-self.LENGTH // self.BLOCK)
        self.pool = Pool(blocks + 3, PAYLOAD if form == "compact" else ROPED, gap=self.BLOCK, seed=1)
        self.table = torch.randperm(blocks + 3, generator=generator)[:blocks]
        self.latent = (torch.randn(self.LENGTH, LATENT, generator=generator) * 2).bfloat16()
        self.query = (torch.randn(3, heads, LATENT, generator=generator) * 2).bfloat16()
        pools = torch.randperm(1000, generator=generator)[:512]
        positions = torch.arange(self.LENGTH)
        self.slots = self.table[positions // self.BLOCK] * self.BLOCK + positions % self.BLOCK
        self.candidates = torch.stack([
            pooled_candidates(pools, self.LENGTH, 2176), causal_candidates(70, 2176), torch.full((2176,), -1).int()
        ])  # fmt: skip

    def run(self, impl) -> torch.Tensor:
        """Writes the sequence and answers the queries with `impl`; self.pool then holds the bytes."""
        latent, slots = self.latent.to(self.device), self.slots.to(self.device)
        memory = self.pool.bytes.to(self.device)
        cache = memory.as_strided(self.pool.view.shape, self.pool.view.stride())
        no_rope, layer = latent.new_empty(self.LENGTH, 1, 0), ("fp8_ds_mla", torch.ones(1, device=self.device))
        first = slots.clone()
        first[0] = -1  # padding of a step; token 0 comes with the next one
        impl.do_kv_cache_update(latent, no_rope, cache, first, *layer)
        impl.do_kv_cache_update(latent[:1], no_rope[:1], cache, slots[:1], *layer)
        impl.topk_indices_buffer[:3] = self.candidates.to(self.device)
        metadata = SimpleNamespace(
            block_size=self.BLOCK, block_table=self.table[None].int().to(self.device), num_decode_tokens=3,
            req_id_per_token=torch.zeros(3, dtype=torch.int32, device=self.device),
        )  # fmt: skip
        result = impl.forward_mqa(self.query.to(self.device), cache, metadata, None)[0]
        self.pool.bytes.copy_(memory)
        return result.cpu()

    def oracle(self, candidates: torch.Tensor | None = None) -> torch.Tensor:
        rows = global_rows(self.candidates if candidates is None else candidates, self.table, self.pool)
        return oracle(self.query, self.pool, rows, 256**-0.5)
