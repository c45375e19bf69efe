"""Random packed experts and routing, and what they should give: an oracle in float64 from the same bits."""

import math
from dataclasses import dataclass

import torch
from vllm_exl3.format import HADAMARD_BLOCK, TILE, Codebook, Exl3Tensors, codebook_values
from vllm_exl3.ops import PackedExperts
from vllm_exl3.reference import decode_weight, swiglu

# Every rate and codebook that the format has.
KINDS = [(bits, codebook) for codebook in Codebook for bits in range(1, 9)]
KINDS += [(bits, Codebook.MUL1) for bits in (1.5, 2.5, 3.5)]
TUNED_KINDS = [(bits, codebook) for codebook in (Codebook.MCG, Codebook.MUL1) for bits in (3, 4, 5, 6)]

# Rows per expert: none, one, and both sides of every tile edge.
ROW_COUNTS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)


def kind_name(kind) -> str:
    return f"{kind[1].value}-{kind[0]:g}"


def make_experts(
    count: int, hidden: int, width: int, *, bits: float = 4, codebook: Codebook = Codebook.MCG, device="cpu",
    shared_suh: bool = True, gate_size: float = 1.5, seed: int = 0,
) -> PackedExperts:  # fmt: skip
    """Random bits are a valid trellis, so the weights have the codebook's own distribution. `gate_size` is about
    the standard deviation of gate and up for inputs of size 1."""
    assert hidden % HADAMARD_BLOCK == width % HADAMARD_BLOCK == 0
    generator = torch.Generator(device).manual_seed(seed)
    words = round(TILE * bits)
    spread = codebook_values(codebook).float().std().item()

    def trellis(*shape):
        return torch.randint(-(2**15), 2**15, (count, *shape, words), generator=generator, device=device).short()

    def scales(*shape, size):
        signs = torch.randint(0, 2, (count, *shape), generator=generator, device=device) * 2 - 1
        spread = torch.rand(count, *shape, generator=generator, device=device) + 0.5
        return (signs * spread * size).half()

    w13_suh = scales(2, hidden, size=gate_size / (spread * math.sqrt(hidden)))
    if shared_suh:
        w13_suh[:, 1] = w13_suh[:, 0]
    return PackedExperts(
        w13_trellis=trellis(2, hidden // TILE, width // TILE),
        w13_suh=w13_suh,
        w13_svh=scales(2, width, size=1.0),
        w2_trellis=trellis(width // TILE, hidden // TILE),
        w2_suh=scales(width, size=1 / (spread * math.sqrt(width))),
        w2_svh=scales(hidden, size=1.0),
        codebook=codebook,
        shared_suh=shared_suh,
    )


@dataclass(frozen=True)
class Routing:
    ids: torch.Tensor  # int32 [tokens, top_k]
    weights: torch.Tensor  # fp32 [tokens, top_k]

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


def route_uniform(tokens: int, top_k: int, experts: int, device="cpu", seed: int = 0) -> Routing:
    """Each token's experts differ, as a router's do."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator, device=device).topk(top_k).indices
    return Routing(ids.int(), _weights(tokens, top_k, generator))


def route_counts(counts, tokens: int, top_k: int, device="cpu", seed: int = 0) -> Routing:
    """Expert i gets exactly counts[i] tokens; what is left of the table is -1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((tokens, top_k), -1, dtype=torch.int32)
    used = torch.zeros(tokens, dtype=torch.int64)
    for expert, count in sorted(enumerate(counts), key=lambda item: -item[1]):
        # The tokens with the most room, in random order.
        chosen = (used + torch.rand(tokens, generator=generator)).argsort()[:count]
        assert len(chosen) == count, f"{count} rows of one expert need as many tokens"
        ids[chosen, used[chosen]] = expert
        used[chosen] += 1
    ids = torch.stack([row[torch.randperm(top_k, generator=generator)] for row in ids])
    return Routing(ids.to(device), _weights(tokens, top_k, generator).to(device))


def _weights(tokens: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """As GLM-5.3's router gives them: positive, with the routed scaling factor applied."""
    weights = torch.rand(tokens, top_k, generator=generator, device=generator.device) + 0.1
    return 2.5 * weights / weights.sum(-1, keepdim=True)


def inputs(tokens: int, hidden: int, dtype=torch.bfloat16, device="cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tokens, hidden, generator=generator, device=device).to(dtype)


# The oracle


def local_ids(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None = None) -> torch.Tensor:
    """int64 local slots; -1 for what this rank does not have or nobody has."""
    ids = ids.long()
    known = experts if expert_map is None else len(expert_map)
    local = ids if expert_map is None else expert_map.long()[ids.clamp(0, known - 1)]
    return torch.where((ids >= 0) & (ids < known), local, -1)


def weights_of(experts: PackedExperts, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate, up [hidden, width] and down [width, hidden] in float64."""
    pair = zip(experts.w13_trellis[expert], experts.w13_suh[expert], experts.w13_svh[expert], strict=True)
    down = experts.w2_trellis[expert], experts.w2_suh[expert], experts.w2_svh[expert]
    return tuple(decode_weight(Exl3Tensors(*parts, experts.codebook), torch.float64) for parts in (*pair, down))


def oracle_slots(x, local, weights, experts: PackedExperts, limit: float | None, min_rows: int = 1) -> torch.Tensor:
    """float64 [tokens, top_k, hidden]: every pair's weighted output; 0 where the pair is left out."""
    out = torch.zeros(*local.shape, x.shape[-1], dtype=torch.float64, device=x.device)
    for token, place, result in _expert_outputs(x, local, weights, experts, limit, min_rows):
        out[token, place] = result
    return out


def oracle(
    x, routing: Routing, experts: PackedExperts, limit: float | None = 10.0, *, expert_map=None, min_rows: int = 1,
    addend=None,
) -> torch.Tensor:  # fmt: skip
    """float64 [tokens, hidden]."""
    local = local_ids(routing.ids, experts.count, expert_map)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if addend is None else addend.double()
    for token, _, result in _expert_outputs(x, local, routing.weights, experts, limit, min_rows):
        out = out.index_add(0, token, result)
    return out


def _expert_outputs(x, local, weights, experts, limit, min_rows):
    counts = torch.bincount(local[local >= 0].flatten(), minlength=experts.count).tolist()
    for expert in [expert for expert, count in enumerate(counts) if count >= max(min_rows, 1)]:
        token, place = (local == expert).nonzero(as_tuple=True)
        gate, up, down = weights_of(experts, expert)
        rows = x[token].double()
        result = swiglu(rows @ gate, rows @ up, limit) @ down
        yield token, place, result * weights[token, place, None].double()
