"""The unquantised experts of GLM-5.3 in PyTorch."""

import functools

import torch
import torch.nn.functional as F


def process_weights_after_loading(original):
    """Experts with a clamp keep their plain weights; vLLM's kernel wants its own layout."""

    @functools.wraps(original)
    def process(self, layer):
        if self.moe_config.swiglu_limit is None:
            original(self, layer)

    return process


def apply_experts(original):
    @functools.wraps(original)
    def apply(self, *, output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map, **rest):
        limit = self.moe_config.swiglu_limit
        if limit is None:
            named = {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map}
            return original(self, output=output, hidden_states=hidden_states, w1=w1, w2=w2, **named, **rest)
        ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        output.copy_(clamped_swiglu_experts(hidden_states, w1, w2, topk_weights, ids, limit))

    return apply


def clamped_swiglu_experts(x, w13, w2, weights, ids, limit: float) -> torch.Tensor:
    """x [tokens, hidden], w13 [experts, 2 * width, hidden], w2 [experts, hidden, width], weights and ids
    [tokens, top_k]; -1 is an expert of another rank. Returns the weighted sums of the experts' outputs,
    summed in fp32."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], w13[expert]).float().chunk(2, -1)
        inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        out = F.linear(inner.to(x.dtype), w2[expert]).float()
        total.index_add_(0, rows, out * weights[rows, slots].float().unsqueeze(-1))
    return total
