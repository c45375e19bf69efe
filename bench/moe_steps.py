"""Layers and steps that bench/moe.py measures: experts, routings, and what sampled tokens should give."""

import functools
from dataclasses import dataclass, replace

import torch
from packed_experts import Routing, inputs, make_experts, route_uniform, weights_of
from vllm_exl3.few_rows import FusedExperts
from vllm_exl3.gpu_experts import GpuExperts, Plan, local_slots
from vllm_exl3.reference import swiglu
from vllm_exl3.switches import MOST_FEW_ROWS

BITS, TOP_K, LIMIT = 4, 8, 10.0
ROUTINGS = ("uniform", "zipf", "same")


@dataclass(frozen=True)
class Geometry:
    experts: int  # local
    known: int  # to the router
    width: int
    hidden: int = 4096


GEOMETRIES = {"tp2": Geometry(288, 288, 1024), "tp4": Geometry(288, 288, 512), "ep3": Geometry(96, 288, 2048)}


class Layer:
    """A geometry's experts, packed and decoded, and what runs them."""

    def __init__(self, geometry: Geometry, plan: Plan, max_tokens: int, device: str) -> None:
        g = self.geometry = geometry
        self.plan, self.max_tokens, self.device = plan, max_tokens, device
        self.packed = make_experts(g.experts, g.hidden, g.width, bits=BITS, device=device)
        self.expert_map = None
        if g.experts < g.known:  # the second rank's
            self.expert_map = torch.full((g.known,), -1, dtype=torch.int32, device=device)
            self.expert_map[g.experts : 2 * g.experts] = torch.arange(g.experts, device=device)
        # fp32, a row for each output: [experts, 2*width, hidden] with gate first, [experts, hidden, width].
        self.w13 = torch.empty(g.experts, 2 * g.width, g.hidden, device=device)
        self.w2 = torch.empty(g.experts, g.hidden, g.width, device=device)
        for expert in range(g.experts):
            gate, up, down = weights_of(self.packed, expert)
            self.w13[expert, : g.width], self.w13[expert, g.width :], self.w2[expert] = gate.T, up.T, down.T

    @functools.cached_property
    def ours(self) -> GpuExperts:
        return GpuExperts(self.packed, limit=LIMIT, top_k=TOP_K, max_tokens=self.max_tokens, plan=self.plan)

    @functools.cached_property
    def fused(self) -> FusedExperts:
        most = {"cap": MOST_FEW_ROWS, "partition_tokens": self.max_tokens}
        return FusedExperts(self.packed, limit=LIMIT, top_k=TOP_K, **most)

    @functools.cached_property
    def bf16(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[experts, in, out], an output's weights side by side."""
        return self.w13.bfloat16().transpose(1, 2), self.w2.bfloat16().transpose(1, 2)

    def want(self, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float64 [tokens, hidden]."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in slots[slots >= 0].unique().tolist():
            token, place = (slots == expert).nonzero(as_tuple=True)
            gate, up = (x[token].double() @ self.w13[expert].double().T).chunk(2, -1)
            result = swiglu(gate, up, LIMIT) @ self.w2[expert].double().T
            out.index_add_(0, token, result * weights[token, place, None].double())
        return out


def route(kind: str, tokens: int, experts: int, device: str, seed: int) -> Routing:
    even = route_uniform(tokens, TOP_K, experts, device, seed)
    if kind == "uniform":
        return even
    # By popularity. 97 spreads the popular ones evenly over three ranks of 96; every seed has other favourites.
    order = (torch.arange(experts, device=device) * 97 + 31 * seed) % experts
    if kind == "same":
        ids = order[:TOP_K].expand(tokens, TOP_K)
    else:  # Zipf 1.0, as a race: the r-th expert takes r times as long, and the first eight are chosen
        generator = torch.Generator(device).manual_seed(seed)
        finish = torch.empty(tokens, experts, device=device).exponential_(generator=generator)
        finish *= torch.arange(1, experts + 1, device=device)
        ids = order[finish.topk(TOP_K, largest=False).indices]
    return replace(even, ids=ids.int().contiguous())


class Step:
    """Rows, their routing, and what `sampled` of them should give."""

    def __init__(self, layer: Layer, kind: str, tokens: int, seed: int, sampled: int) -> None:
        g = layer.geometry
        self.x = inputs(tokens, g.hidden, device=layer.device)
        routing = route(kind, tokens, g.known, layer.device, seed)
        self.ids, self.weights = routing.ids, routing.weights
        slots = local_slots(self.ids, layer.expert_map)
        self.counts = torch.bincount(slots[slots >= 0], minlength=g.experts)
        self.rows, self.most_rows = int(self.counts.sum()), int(self.counts.max())
        self.active = int((self.counts > 0).sum())
        # Places in ids of the rows that are here, sorted by expert.
        self.order = slots.flatten().argsort(stable=True)[slots.numel() - self.rows :]
        count = min(sampled, tokens)
        self.sample = torch.arange(count, device=layer.device) * tokens // count
        self.want = layer.want(self.x[self.sample], slots[self.sample], self.weights[self.sample])
