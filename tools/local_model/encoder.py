"""Quantises weight matrices to EXL3: regularisation, LDLQ, and an exact Viterbi search on every tile.

Batched over tiles in torch: 65,536 states a tile and step, so a GPU is the place for more than a few
hundred tiles. Only whole rates (1..8 bits) are produced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm_exl3.format import (
    STATE_BITS,
    TILE,
    TILE_WEIGHTS,
    Codebook,
    Exl3FormatError,
    Exl3Tensors,
    codebook_values,
    is_legal_rate,
    pack_states,
    ring_to_tile,
)
from vllm_exl3.reference import decode_inner, decode_weight, transform_blocks

# Regularised weights are brought to the standard deviation of the MCG and 3INST codebooks.
TARGET_STD = 1.24371088
# Relative weight of the mean diagonal that is added to a Hessian before it is factored.
DAMPING = 0.025
_STATES = 2**STATE_BITS
_WORKSPACE_BYTES = {"cuda": 8 << 30, "cpu": 64 << 20}


def nearest_states(targets: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
    """The closed state ring nearest to each tile: fp32 [tiles, 256] in ring order -> int32 [tiles, 256].

    Two passes: the first, with every start node free, begins half way round to learn which node lies
    between elements 255 and 0; the second is held to that node at both ends, so that the ring closes.
    """
    if not is_legal_rate(bits, codebook) or bits != int(bits):
        raise Exl3FormatError(f"encoder: {bits} bits requested; it produces 1..8 whole bits a weight.")
    per_tile = 3 * _STATES * 4 + TILE_WEIGHTS * (_STATES >> bits)
    chunk = max(1, _WORKSPACE_BYTES[targets.device.type] // per_tile)
    parts = [_tail_biting(part, int(bits), codebook) for part in targets.float().split(chunk)]
    return torch.cat(parts)


def _tail_biting(targets: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
    half = TILE_WEIGHTS // 2
    rotated = _best_path(targets.roll(half, -1), bits, codebook, node=None)
    # Rotated element `half - 1` is element 255; the node after it is the low bits of its state.
    node = rotated[:, half - 1] & ((_STATES >> bits) - 1)
    return _best_path(targets, bits, codebook, node)


def _best_path(targets: torch.Tensor, bits: int, codebook: Codebook, node: torch.Tensor | None) -> torch.Tensor:
    """Viterbi over 256 steps. `node` [tiles] fixes the node before the first and after the last step.

    A state is its top `bits` bits (the branch) above the node that it leads to; it comes from the node
    `state >> bits`.
    """
    tiles, device = targets.shape[0], targets.device
    nodes, branches = _STATES >> bits, 1 << bits
    values = codebook_values(codebook).float().to(device).view(branches, nodes)
    cost = torch.zeros(tiles, nodes, device=device)
    if node is not None:
        cost.fill_(torch.inf).scatter_(1, node[:, None].long(), 0.0)
    taken = torch.empty(TILE_WEIGHTS, tiles, nodes, dtype=torch.uint8, device=device)
    for step in range(TILE_WEIGHTS):
        branch_cost = (values - targets[:, step, None, None]).square_()
        branch_cost += cost.repeat_interleave(branches, dim=1).view(tiles, branches, nodes)
        cost, branch = branch_cost.min(dim=1)
        taken[step] = branch
    end = cost.argmin(dim=1) if node is None else node.long()
    return _trace_back(taken, end, bits)


def _trace_back(taken: torch.Tensor, end: torch.Tensor, bits: int) -> torch.Tensor:
    states = torch.empty(len(end), TILE_WEIGHTS, dtype=torch.int32, device=end.device)
    node = end
    for step in range(TILE_WEIGHTS - 1, -1, -1):
        branch = taken[step].gather(1, node[:, None])[:, 0].long()
        state = (branch << (STATE_BITS - bits)) | node
        states[:, step] = state
        node = state >> bits
    return states


def encode_inner(inner: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
    """Trellis [in/16, out/16, 16*K] of a regularised matrix [in, out], each tile on its own."""
    rows, cols = inner.shape
    tiles = inner.unflatten(0, (-1, TILE)).unflatten(-1, (-1, TILE)).transpose(1, 2).flatten(2)
    ring = tiles[..., ring_to_tile().to(inner.device)].flatten(0, 1)
    packed = pack_states(nearest_states(ring, bits, codebook), bits)
    return packed.view(rows // TILE, cols // TILE, -1)


@dataclass(frozen=True)
class Regularised:
    """A weight brought to near-Gaussian form: W = diag(suh) H inner H diag(svh)."""

    inner: torch.Tensor  # fp32 [in, out]
    suh: torch.Tensor  # fp16 [in]
    svh: torch.Tensor  # fp16 [out]


def regularise(weight: torch.Tensor, in_sign: torch.Tensor, out_sign: torch.Tensor) -> Regularised:
    """Random signs, output-channel scales, row scales and two Hadamard transforms.

    weight [in, out] fp32; in_sign [in] and out_sign [out] hold +-1. The scales are rounded to fp16 first,
    so that `inner` belongs to what will be stored.
    """
    column_rms = weight.square().mean(0).sqrt().clamp_min(1e-8)
    svh = (out_sign * column_rms / column_rms.mean()).half()
    scaled = weight / svh.float()
    row_rms = scaled.square().mean(1).sqrt().clamp_min(1e-6)
    suh = (in_sign * row_rms / TARGET_STD).half()
    rotated = transform_blocks(scaled / suh.float()[:, None])
    return Regularised(transform_blocks(rotated.T).T.contiguous(), suh, svh)


def quantise(
    weights: torch.Tensor,
    bits: int,
    codebook: Codebook,
    generator: torch.Generator,
    hessians: torch.Tensor | None = None,
    in_sign: torch.Tensor | None = None,
    gain: float = 1.0,
) -> list[Exl3Tensors]:
    """Quantise matrices of one shape, [count, in, out], together.

    hessians  [count, in, in]: mean of x x^T over calibration inputs; None encodes every tile on its own
    in_sign   [in] +-1 shared by all; None draws one for each matrix
    gain      factor on the regularised weights before the search (see `best_gain`)
    """
    regular = [_regularise_randomly(weight, generator, in_sign, gain) for weight in weights.float()]
    if hessians is None:
        trellis = [encode_inner(r.inner, bits, codebook) for r in regular]
    else:
        factors = torch.stack([_feedback(h, r.suh) for h, r in zip(hessians, regular, strict=True)])
        trellis = _encode_with_feedback(torch.stack([r.inner for r in regular]), factors, bits, codebook)
    stored = [Exl3Tensors(t, r.suh, r.svh, codebook) for t, r in zip(trellis, regular, strict=True)]
    identity = torch.eye(weights.shape[1], device=weights.device)
    return [
        _refit_outputs(tensors, weight, identity if hessians is None else hessians[i])
        for i, (tensors, weight) in enumerate(zip(stored, weights.float(), strict=True))
    ]


def _regularise_randomly(
    weight: torch.Tensor, generator: torch.Generator, in_sign: torch.Tensor | None, gain: float
) -> Regularised:
    rows, cols = weight.shape
    sign = random_sign(rows, generator) if in_sign is None else in_sign
    regular = regularise(weight, sign.to(weight.device), random_sign(cols, generator).to(weight.device))
    suh = (regular.suh.float() / gain).half()
    # Exact for the rounded scale: the rows go through the transform again with what suh became.
    left = transform_blocks(regular.inner.T).T * (regular.suh.float() / suh.float())[:, None]
    return Regularised(transform_blocks(left.T).T.contiguous(), suh, regular.svh)


def random_sign(length: int, generator: torch.Generator) -> torch.Tensor:
    return (torch.randint(0, 2, (length,), generator=generator) * 2 - 1).float()


def _feedback(hessian: torch.Tensor, suh: torch.Tensor) -> torch.Tensor:
    """L - I [in, in] of the block LDL factorisation of the rotated Hessian, in blocks of 16.

    H' = P diag(suh) H diag(suh) P is what the regularised weights see. With H' = L D L^T and errors E,
    tr(E^T H' E) is smallest if the block b is encoded after the later ones and takes over their errors
    through (L^T E)_b.
    """
    scale = suh.double()
    scaled = scale[:, None] * hessian.double() * scale[None, :]
    rotated = transform_blocks(transform_blocks(scaled).T)
    rotated.diagonal().add_(DAMPING * rotated.diagonal().mean())
    lower = torch.linalg.cholesky(rotated)
    for start in range(0, len(lower), TILE):
        block = slice(start, start + TILE)
        lower[:, block] = torch.linalg.solve(lower[block, block], lower[:, block], left=False)
    return (lower - torch.eye(len(lower), device=lower.device)).float()


def _encode_with_feedback(inner: torch.Tensor, feedback: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
    """LDLQ over 16-row bands from the last to the first; inner [count, in, out]."""
    count, rows, cols = inner.shape
    error = torch.zeros_like(inner)
    bands = []
    for start in range(rows - TILE, -1, -TILE):
        band = slice(start, start + TILE)
        carried = feedback[:, start + TILE :, band].transpose(1, 2) @ error[:, start + TILE :]
        target = inner[:, band] + carried
        # One wide band: the matrices side by side.
        wide = target.transpose(0, 1).reshape(TILE, count * cols)
        packed = encode_inner(wide, bits, codebook)
        decoded = _decode_band(packed, codebook).view(TILE, count, cols).transpose(0, 1)
        error[:, band] = inner[:, band] - decoded
        bands.append(packed.view(count, cols // TILE, -1))
    return torch.stack(bands[::-1], dim=1)


def _decode_band(packed: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    unused = packed.new_empty(0, dtype=torch.float16)
    return decode_inner(Exl3Tensors(packed, unused, unused, codebook)).float()


def _refit_outputs(tensors: Exl3Tensors, weight: torch.Tensor, hessian: torch.Tensor) -> Exl3Tensors:
    """Rescale each output channel to the least-squares fit of `weight` [in, out] under the Hessian."""
    decoded = decode_weight(tensors)
    weighted = hessian.float() @ decoded
    scale = (weighted * weight).sum(0) / (weighted * decoded).sum(0).clamp_min(1e-12)
    return Exl3Tensors(tensors.trellis, tensors.suh, (tensors.svh.float() * scale).half(), tensors.codebook)


def relative_error(tensors: Exl3Tensors, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(E^T H E) / tr(W^T H W), the part of the output energy that quantisation changed."""
    error = weight.float() - decode_weight(tensors)
    lost = (error * (hessian.float() @ error)).sum()
    return (lost / (weight.float() * (hessian.float() @ weight.float())).sum()).item()


def best_gain(bits: int, codebook: Codebook, tiles: int = 64, device: str = "cpu", seed: int = 0) -> float:
    """The factor on Gaussian weights of `TARGET_STD` that leaves the least relative error after rescaling."""
    generator = torch.Generator().manual_seed(seed)
    source = (TARGET_STD * torch.randn(tiles, TILE_WEIGHTS, generator=generator)).to(device)
    values = codebook_values(codebook).float().to(device)
    errors = {}
    for gain in (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05):
        decoded = values[nearest_states(gain * source, bits, codebook).long()] / gain
        errors[gain] = (decoded - source).square().mean().item()
    return min(errors, key=errors.get)
