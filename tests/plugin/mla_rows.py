"""Sparse MLA over packed cache rows: the bytes, the kernel's steps as FlashInfer's sources read them, and an oracle.

PyTorch on the CPU. The kernel is the split-K one for up to 64 tokens: warps of 8 candidates, chunks of 64, queries and
weights rounded to e4m3 (weights in two limbs), float32 sums. A tensor core's sum of one instruction is taken as exact,
then rounded once to float32.
"""

from dataclasses import dataclass

import torch

LATENT, GROUP, ROPE, PAYLOAD, ROPED = 512, 128, 64, 528, 656
CHUNK, WARP = 64, 8
LEAST_SCALE = 1e-4  # of vLLM's writer, before it goes up to a power of two
LARGEST, LOG2E, MASKED = 448.0, 1.44269504088896340736, -1e30
POOL = 4  # tokens of which the indexer makes one key
E4M3 = torch.float8_e4m3fn


# Bytes


def quantise(latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """latent [n, 512] -> e4m3 bytes [n, 512], float32 scales [n, 4], by the rule of vLLM's writer."""
    groups = latent.float().unflatten(1, (-1, GROUP))
    mantissa, exponent = torch.frexp((groups.abs().amax(2) / LARGEST).clamp_min(LEAST_SCALE))
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return to_e4m3(groups / scale[..., None]).flatten(1), scale


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8)


def from_e4m3(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(E4M3).float()


class Pool:
    """Cache blocks that other layers used before: every byte is garbage until it is written.

    `gap` rows of another layer lie behind the rows of each block.
    """

    def __init__(self, blocks: int, row_bytes: int, block_tokens: int = CHUNK, gap: int = 0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block_tokens, self.row_bytes = block_tokens, row_bytes
        self.block_rows = block_tokens + gap
        size = blocks * self.block_rows * row_bytes
        self.bytes = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        self.view = self.bytes.as_strided(
            (blocks, block_tokens, row_bytes), (self.block_rows * row_bytes, row_bytes, 1)
        )  # fmt: skip

    def write(self, latent: torch.Tensor, slots: torch.Tensor, rope: torch.Tensor | None = None) -> None:
        """Store latent [n, 512], and rope [n, 64] bfloat16 behind it where there is one; slots below 0 are left out."""
        kept = slots >= 0
        data, scale = quantise(latent[kept])
        parts = [data, scale.view(torch.uint8)] + ([] if rope is None else [rope[kept].view(torch.uint8)])
        row = torch.cat(parts, dim=1)
        block, place = slots[kept] // self.block_tokens, slots[kept] % self.block_tokens
        self.view[block, place, : row.shape[1]] = row


def global_rows(candidates: torch.Tensor, table: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Positions in a sequence [tokens, n] -> rows of the pool, as vLLM's index kernel maps them; -1 stays -1."""
    safe = candidates.clamp_min(0)
    found = table[safe // pool.block_tokens] * pool.block_rows + safe % pool.block_tokens
    return torch.where(candidates >= 0, found, -1).int()


# What the indexer hands over


def causal_candidates(position: int, width: int) -> torch.Tensor:
    """All tokens up to `position` of a short sequence."""
    columns = torch.arange(width)
    return torch.where(columns <= position, columns, -1).int()


def pooled_candidates(pools: torch.Tensor, length: int, width: int) -> torch.Tensor:
    """pools [k] (-1: none) -> their tokens, then the tail of the incomplete pool, then -1."""
    tokens = pools[:, None] * POOL + torch.arange(POOL)
    row = torch.full((width,), -1)
    row[: tokens.numel()] = torch.where(pools[:, None] >= 0, tokens, -1).flatten()
    tail = torch.arange(length // POOL * POOL, length)
    row[tokens.numel() : tokens.numel() + len(tail)] = tail
    return row.int()


# The kernel


@dataclass(frozen=True)
class Kernel:
    """How the kernel reads a row. The defaults are FlashInfer's; a test plants a bug by another value."""

    rope: bool  # 576 columns rather than 512
    scale_order: tuple[int, ...] = (0, 1, 2, 3)
    stride: int | None = None  # bytes between rows; None: those of the pool

    def gather(self, pool: Pool, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """rows [n] -> latent e4m3 bytes [n, 512], scales [n, 4], rope [n, 64]; for -1 zeros, not the cache's bytes."""
        length = PAYLOAD + 2 * ROPE * self.rope
        at = rows.clamp_min(0).long()[:, None] * (self.stride or pool.row_bytes) + torch.arange(length)
        data = pool.bytes[at % len(pool.bytes)] * (rows >= 0)[:, None].to(torch.uint8)
        scales = data[:, LATENT:PAYLOAD].contiguous().view(torch.float32)[:, list(self.scale_order)]
        rope = data[:, PAYLOAD:].contiguous().view(torch.bfloat16).float() if self.rope else torch.zeros(len(rows), 0)
        return data[:, :LATENT], scales, rope

    def attend(self, query, pool: Pool, rows, scale: float, chunks_per_split: int = 5) -> tuple:
        """query [tokens, heads, 512 or 576] bfloat16, rows [tokens, n] int32 ->
        what it stores [tokens, heads, 512] bfloat16, and the same in float32 without the rounding of both stores."""
        splits = [self._splits(query[t], pool, rows[t], scale, chunks_per_split) for t in range(len(query))]
        stored = [_merge([(part.bfloat16().float(), log) for part, log in split]).bfloat16() for split in splits]
        return torch.stack(stored), torch.stack([_merge(split) for split in splits])

    def _splits(self, query, pool, rows, scale, chunks_per_split):
        rows = torch.nn.functional.pad(rows, (0, -len(rows) % CHUNK), value=-1)
        latent, scales, rope = self.gather(pool, rows)
        values = from_e4m3(latent)
        scores = self._scores(query, values, scales, rope)
        scores = torch.where(rows >= 0, scores * torch.tensor(scale * LOG2E, dtype=torch.float32), MASKED)
        chunks = list(range(0, len(rows), CHUNK))
        splits = [chunks[i : i + chunks_per_split] for i in range(0, len(chunks), chunks_per_split)]
        return [_split(scores, values, scales, split) for split in splits]

    def _scores(self, query, values, scales, rope) -> torch.Tensor:
        """[heads, n] float32, unscaled."""
        q, q_scale = quantise_query(query[:, :LATENT])
        scores = torch.zeros(len(query), len(values))
        for group in range(LATENT // GROUP):
            partial = torch.zeros_like(scores)
            for k in range(group * GROUP, (group + 1) * GROUP, 32):
                partial = _mma(partial, q[:, k : k + 32], values[:, k : k + 32].T)
            scores = scores + partial * q_scale[:, group, None] * scales[:, group]
        for k in range(0, rope.shape[1], 16):
            scores = _mma(scores, query[:, LATENT + k : LATENT + k + 16].float(), rope[:, k : k + 16].T)
        return scores


def quantise_query(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """query [heads, 512] -> e4m3 values as float32, power-of-two scales [heads, 4]."""
    groups = query.float().unflatten(1, (-1, GROUP))
    raw = groups.abs().amax(2).clamp_min(1e-4) / LARGEST
    mantissa, exponent = torch.frexp(raw)
    scale = torch.ldexp(torch.ones_like(raw), exponent - (mantissa == 0.5).int())
    return from_e4m3(to_e4m3(groups / scale[..., None])).flatten(1), scale


def _mma(accumulator, left, right) -> torch.Tensor:
    return (accumulator.double() + left.double() @ right.double()).float()


def _split(scores, values, scales, chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """One block's chunks: (result [heads, 512] before it is stored in bfloat16, log2 of the sum [heads])."""
    heads = len(scores)
    largest, total = torch.full((heads,), MASKED), torch.zeros(heads)
    result = torch.zeros(heads, LATENT)
    for start in chunks:
        s = scores[:, start : start + CHUNK].unflatten(1, (-1, WARP))
        warp_max = s.amax(2)
        p = torch.where(warp_max[..., None] > MASKED / 10, torch.exp2(s - warp_max[..., None]), 0.0)
        pairs = p[..., 0::2] + p[..., 1::2]
        warp_sum = (pairs[..., 0] + pairs[..., 2]) + (pairs[..., 1] + pairs[..., 3])
        chunk_max = warp_max.amax(1)
        chunk_sum = torch.zeros(heads)
        for warp in range(s.shape[1]):
            chunk_sum = chunk_sum + warp_sum[:, warp] * torch.exp2(warp_max[:, warp] - chunk_max)
        before, largest = largest, torch.maximum(largest, chunk_max)
        shrink = torch.where(before > MASKED / 10, torch.exp2(before - largest), 0.0)
        total = total * shrink + chunk_sum * torch.exp2(chunk_max - largest)
        weights = (p * torch.exp2(warp_max - largest[:, None])[..., None]).flatten(1)
        here = slice(start, start + CHUNK)
        result = result * shrink[:, None] + _weigh(weights, values[here], scales[here])
    inverse = torch.where(total > 0, 1 / total, 0.0)
    return result * inverse[:, None], torch.where(total > 0, torch.log2(total) + largest, MASKED)


def _weigh(weights, values, scales) -> torch.Tensor:
    """weights [heads, 64] x values [64, 512], the rows' scales folded into two e4m3 limbs of the weights."""
    parts = []
    for group in range(LATENT // GROUP):
        scaled = weights * scales[:, group]
        unit = scaled.abs().amax(1, keepdim=True).clamp_min(1e-10) / LARGEST
        normal = (scaled * (1 / unit)).clamp(-LARGEST, LARGEST)
        high = from_e4m3(to_e4m3(normal))
        total = torch.zeros(len(weights), GROUP)
        for limb in (high, from_e4m3(to_e4m3(normal - high))):
            for k in range(0, CHUNK, 32):
                columns = slice(group * GROUP, (group + 1) * GROUP)
                total = _mma(total, limb[:, k : k + 32], values[k : k + 32, columns])
        parts.append(total * unit)
    return torch.cat(parts, dim=1)


def _merge(splits) -> torch.Tensor:
    logs = torch.stack([log for _, log in splits])  # [splits, heads]
    most = logs.amax(0)
    largest = torch.where(most > MASKED / 10, most, 0.0)
    weights = torch.where(logs > MASKED / 10, torch.exp2(logs - largest), 0.0)
    result = torch.zeros(splits[0][0].shape)
    for (part, _), weight in zip(splits, weights, strict=True):
        result = torch.where(weight[:, None] > 0, result + weight[:, None] * part, result)
    total = weights.sum(0)
    return result * torch.where(total > 0, 1 / total, 0.0)[:, None]


# The oracle


def oracle(query: torch.Tensor, pool: Pool, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Sparse MLA in float64 from the bytes of the rows and of the quantised queries: [tokens, heads, 512]."""
    results = []
    for q, row in zip(query, rows, strict=True):
        data, q_scale = quantise_query(q[:, :LATENT])
        q = (data.double().unflatten(1, (-1, GROUP)) * q_scale.double()[..., None]).flatten(1)
        at = row[row >= 0].long()[:, None] * pool.row_bytes + torch.arange(PAYLOAD)
        payload = pool.bytes[at]
        scales = payload[:, LATENT:].contiguous().view(torch.float32).double()
        keys = (from_e4m3(payload[:, :LATENT]).double().unflatten(1, (-1, GROUP)) * scales[..., None]).flatten(1)
        results.append(torch.softmax(q @ keys.T * scale, dim=1) @ keys if len(keys) else torch.zeros(q.shape).double())
    return torch.stack(results)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 of the difference over L2 of `want`, infinite where `got` is not finite."""
    if not got.isfinite().all():
        return float("inf")
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
