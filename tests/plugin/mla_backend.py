"""vLLM's real sparse MLA classes for SM12x with stand-ins for the three CUDA kernels that they call.

The stand-ins take what vLLM passes them, refuse what the kernels refuse, and read and write the same bytes.
"""

import contextlib
import socket
import sys
import textwrap
from types import SimpleNamespace

import torch
from mla_rows import LATENT, PAYLOAD, ROPE, ROPED, Kernel, quantise

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
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())[start:]


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
        memory = Memory(kv_cache)
        self.calls.append((query, kv_cache, block_tables))
        out[:, 0] = Kernel(rope=rope > 0).attend(query[:, 0], memory, block_tables[:, 0], bmm1_scale)[0]
        return out


@contextlib.contextmanager
def vllm_config():
    """A real VllmConfig of one rank, with the few fields of the model that the classes read."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    config = VllmConfig(device_config=DeviceConfig("cpu"))
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


def make_impl(cls, heads: int, *, rope: int = 0, width: int = 2176, tokens: int = 8):
    """An attention implementation of GLM-5.3-Flash's shapes; inside `vllm_config`."""
    return cls(
        heads, LATENT + rope, 256**-0.5, 1, None, None, "fp8_ds_mla", None, "decoder", None,
        q_lora_rank=1536, kv_lora_rank=LATENT, qk_nope_head_dim=256, qk_rope_head_dim=rope, qk_head_dim=256 + rope,
        v_head_dim=256, kv_b_proj=None, topk_indices_buffer=torch.full((tokens, width), -1, dtype=torch.int32),
    )  # fmt: skip
