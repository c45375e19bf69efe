"""Writes compact rows into the KV cache; vLLM's own writer insists on 656 bytes."""

import torch
from vllm.triton_utils import tl, triton

from vllm_exl3.nope_mla.geometry import GROUP, LATENT, PAYLOAD_BYTES

GROUPS = LATENT // GROUP


@triton.jit
def _write_rows_kernel(
    latent,  # [tokens, 512], the last dimension contiguous
    cache,  # uint8 [blocks, block_tokens, ROW_BYTES], rows contiguous within a block
    slots,  # int64 [tokens], below 0: not written
    latent_stride,  # elements between tokens
    block_stride,  # bytes between blocks; other layers' pages may lie in between
    block_tokens,
    LATENT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        row = cache + (slot // block_tokens) * block_stride + (slot % block_tokens) * ROW_BYTES
        group = tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(latent + token * latent_stride + column).to(tl.float32)

        # The same rule as vLLM's writer, so that a geometry changes no bit of an answer: largest magnitude over 448, at
        # least 1e-4, then up to a power of two, whose bits are a float's with an empty mantissa.
        largest = tl.max(tl.abs(x), axis=1)
        least = tl.full([GROUPS], 1e-4, tl.float32)  # as a bare number Triton would widen it all to fp64
        exact = tl.maximum(tl.div_rn(largest, tl.full([GROUPS], 448.0, tl.float32)), least)
        scale = ((exact.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        value = tl.div_rn(x, tl.broadcast_to(scale[:, None], [GROUPS, GROUP])).to(tl.float8e4nv)

        tl.store(row + column, value.to(tl.uint8, bitcast=True))
        tl.store((row + LATENT).to(tl.pointer_type(tl.float32)) + group, scale)


def write_rows(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise latent [tokens, 512] (bfloat16 or float32) and store it in cache uint8 [blocks, block tokens, 528].

    slots int64 [at most tokens]: block * block tokens + place; tokens with a slot below 0 are left out.
    """
    assert cache.dtype == torch.uint8 and cache.shape[2] == PAYLOAD_BYTES and latent.shape[1] == LATENT
    assert cache.stride(1) == PAYLOAD_BYTES and cache.stride(2) == 1 and latent.stride(1) == 1
    if slots.numel() == 0:
        return
    _write_rows_kernel[(slots.numel(),)](
        latent, cache, slots, latent.stride(0), cache.stride(0), cache.shape[1],
        LATENT=LATENT, GROUP=GROUP, GROUPS=GROUPS, ROW_BYTES=PAYLOAD_BYTES, num_warps=4,
    )  # fmt: skip
