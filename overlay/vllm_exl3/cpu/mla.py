"""Multi-head latent attention (MLA) on the CPU for a model without rotary embedding.

vLLM's CPU backend is made for 512 latent and 64 rotary channels per cached token; GLM-5.3 has no
rotary ones. The cache is [blocks, 16, latent + rotary].
"""

import torch

KERNEL_BLOCK = 16


def supports_block_size(cls, block_size: int | None) -> bool:
    """Blocks of the cache manager may be any multiple of the kernel's: the runner splits them."""
    return block_size is None or block_size % KERNEL_BLOCK == 0


def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
    """Write one row per token; tokens with a negative slot are padding."""
    if kv_cache.numel() == 0:  # the profiling run has no cache yet
        return
    slots = slot_mapping.flatten().long()
    rows = torch.cat((kv_c_normed, k_pe.squeeze(1)), -1)
    real = slots >= 0
    kv_cache.view(-1, rows.shape[-1])[slots[real]] = rows[: slots.numel()][real].to(kv_cache.dtype)


def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
    """Decode with absorbed projections: one query token per request, all heads share keys and values.
    q [requests, heads, latent + rotary], possibly in two parts; returns [requests, heads, latent]."""
    q = torch.cat(q, -1) if isinstance(q, tuple) else q
    out = q.new_zeros(*q.shape[:-1], self.kv_lora_rank)
    decode = attn_metadata.decode
    for i, length in enumerate(decode.seq_lens.tolist()):
        if length <= 0:
            continue
        blocks = decode.block_table[i, : -(-length // KERNEL_BLOCK)]
        keys = kv_c_and_k_pe_cache[blocks.long()].flatten(0, 1)[:length].float()
        weights = torch.softmax(self.scale * (q[i].float() @ keys.T), -1)
        out[i] = (weights @ keys[:, : self.kv_lora_rank]).to(out.dtype)
    return out, None


def zero_block_ids(self, block_ids: list[int]) -> None:
    """Clear blocks of the cache manager, whose numbers these are; the caches are views in kernel blocks.

    Clearing kernel blocks of the same numbers would wipe what other layers keep there, such as the KDA
    states of running requests."""
    for cache in _attention_caches(self):
        parts = cache.shape[0] // self.kv_cache_config.num_blocks
        for block in block_ids:
            cache[block * parts : (block + 1) * parts].zero_()


def _attention_caches(runner) -> list[torch.Tensor]:
    """The distinct caches of the full-attention layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers = runner.compilation_config.static_forward_context
    caches = [
        layers[name].kv_cache
        for group in runner.kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, FullAttentionSpec)
        for name in group.layer_names
        if name in layers
    ]
    return list({c.data_ptr(): c for c in caches if isinstance(c, torch.Tensor)}.values())
