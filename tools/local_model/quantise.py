"""Quantises the routed experts of the trained model to EXL3, with Hessians from its own activations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm_exl3.format import Codebook, Exl3Tensors
from vllm_exl3.reference import decode_weight

from tools.local_model import model
from tools.local_model.batches import TrainingData
from tools.local_model.encoder import best_gain, quantise, random_sign, relative_error

BITS, CODEBOOK = 4, Codebook.MCG
# Rows of the mean over all experts that each expert's own statistics are mixed with.
PRIOR_ROWS = 256


@dataclass
class QuantisedExperts:
    """Per MoE layer: each expert's gate|up (side by side, one input scale) and down weights."""

    gate_up: dict[int, list[Exl3Tensors]] = field(default_factory=dict)
    down: dict[int, list[Exl3Tensors]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def decoded(self, parameters: model.Parameters) -> model.Parameters:
        """A copy of the parameters with the experts replaced by what was stored."""
        copy = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        for index in self.gate_up:
            prefix = f"layers.{index}.mlp.experts."
            copy[prefix + "gate_up"] = torch.stack([decode_weight(w) for w in self.gate_up[index]])
            copy[prefix + "down"] = torch.stack([decode_weight(w) for w in self.down[index]])
        return copy


def quantise_experts(parameters: model.Parameters, text: dict, data: TrainingData, args) -> QuantisedExperts:
    hessians = collect_hessians(parameters, text, data, args)
    generator = torch.Generator().manual_seed(args.seed)
    gain = best_gain(BITS, CODEBOOK, tiles=args.gain_tiles, device=args.device)
    result = QuantisedExperts()
    for index in model.moe_layers(text):
        prefix = f"layers.{index}.mlp.experts."
        for side, stored in (("gate_up", result.gate_up), ("down", result.down)):
            weights, hessian = parameters[prefix + side].detach(), hessians[prefix + side]
            # The published packs share the sign vector of gate and up over all experts of a layer.
            sign = random_sign(weights.shape[1], generator) if side == "gate_up" else None
            stored[index] = quantise(weights, BITS, CODEBOOK, generator, hessian, sign, gain)
            errors = [relative_error(t, w, h) for t, w, h in zip(stored[index], weights, hessian, strict=True)]
            result.errors[f"{index}.{side}"] = round(sum(errors) / len(errors), 6)
    return result


@torch.no_grad()
def collect_hessians(parameters: model.Parameters, text: dict, data: TrainingData, args) -> dict[str, torch.Tensor]:
    """Mean of x x^T over the rows routed to each expert: [experts, in, in] for gate_up and down."""
    sums: dict[str, torch.Tensor] = {}
    routed: dict[str, torch.Tensor] = {}

    def observe(p, prefix, x, text, training=None):
        rows = x.flatten(0, 1)
        chosen = (model.route(p, prefix, rows, text) > 0).float()  # [rows, experts]
        gate, up = (rows @ p[prefix + "experts.gate_up"]).chunk(2, -1)
        inner = model.clamped_swiglu(gate, up, text["swiglu_limit"])
        outer = torch.einsum("re,rh,rk->ehk", chosen, rows, rows)
        inner_outer = torch.einsum("re,erh,erk->ehk", chosen, inner, inner)
        for key, value in (("gate_up", outer), ("down", inner_outer)):
            name = f"{prefix}experts.{key}"
            sums[name] = sums.get(name, 0) + value
            routed[name] = routed.get(name, 0) + chosen.sum(0)
        return original_moe(p, prefix, x, text, training)

    original_moe = model.moe
    model.moe = observe
    try:
        for _ in range(args.calibration_batches):
            batch = data.batch(args.batch_tokens // 4).to(args.device)
            model.logits(parameters, batch.ids, text)
    finally:
        model.moe = original_moe
    return {name: _mix_with_mean(sums[name], routed[name]) for name in sums}


def _mix_with_mean(sums: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Experts that saw few rows lean on the statistics of all."""
    mean = sums.sum(0) / rows.sum()
    return (sums + PRIOR_ROWS * mean) / (rows + PRIOR_ROWS)[:, None, None]
