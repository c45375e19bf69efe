"""EXL3 in plain PyTorch: slow, obvious, and the oracle of every kernel test. No vLLM import."""

import functools

import torch
import torch.nn.functional as F

from vllm_exl3.format import HADAMARD_BLOCK, TILE, Exl3Tensors, codebook_values, ring_to_tile, unpack_states


@functools.cache
def hadamard(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The orthonormal Hadamard matrix [128, 128]: (-1)^popcount(row & column) / sqrt(128)."""
    index = torch.arange(HADAMARD_BLOCK)
    common = index[:, None] & index[None, :]
    parity = sum((common >> bit) & 1 for bit in range(7)) & 1
    return ((1 - 2 * parity).double() / HADAMARD_BLOCK**0.5).to(dtype)


def transform_blocks(x: torch.Tensor) -> torch.Tensor:
    """Apply the Hadamard matrix to each 128-wide block of the last dimension (its own inverse)."""
    blocks = x.unflatten(-1, (-1, HADAMARD_BLOCK))
    return (blocks @ hadamard(x.dtype).to(x.device)).flatten(-2)


def decode_inner(tensors: Exl3Tensors) -> torch.Tensor:
    """The codebook values of all tiles as one matrix: fp16 [in, out], before the outer transforms."""
    values = codebook_values(tensors.codebook).to(tensors.trellis.device)
    ring = values[unpack_states(tensors.trellis).long()]  # [in/16, out/16, 256]
    tiles = torch.empty_like(ring)
    tiles[..., ring_to_tile().to(ring.device)] = ring
    return tiles.unflatten(-1, (TILE, TILE)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def decode_weight(tensors: Exl3Tensors, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The full weight W [in, out] in `dtype` (fp32 or fp64): y = x @ W."""
    inner = decode_inner(tensors).to(dtype)
    left = transform_blocks(inner.T).T * tensors.suh.to(dtype)[:, None]
    return transform_blocks(left) * tensors.svh.to(dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(gate) * up with GLM's clamp: gate at most `limit`, up within +-`limit`."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def moe_forward(
    x: torch.Tensor,  # [tokens, hidden]
    w13: torch.Tensor,  # [experts, hidden, 2*width]: gate columns, then up columns
    w2: torch.Tensor,  # [experts, width, hidden]
    topk_weights: torch.Tensor,  # [tokens, k], routed scaling already applied
    topk_ids: torch.Tensor,  # [tokens, k], global expert ids
    limit: float | None,
    expert_map: torch.Tensor | None = None,  # [global experts]: local slot, or -1 elsewhere
) -> torch.Tensor:
    """The local experts' part of the routed sum, [tokens, hidden] in the weights' dtype; not reduced over ranks.

    Experts are added in ascending order, so a batch gives the same bits every time.
    """
    slots = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]
    rows = x.to(w13.dtype)
    out = torch.zeros_like(rows)
    for expert in slots.unique().tolist():
        if expert < 0:
            continue
        token, position = (slots == expert).nonzero(as_tuple=True)
        gate, up = (rows[token] @ w13[expert]).chunk(2, dim=-1)
        expert_out = swiglu(gate, up, limit) @ w2[expert]
        out.index_add_(0, token, expert_out * topk_weights[token, position, None].to(out.dtype))
    return out
