"""Puts the plugin's own PyTorch decoder in the place of its CUDA kernels. For the proof only; no user's switch."""

import functools

import torch
from vllm_exl3 import few_rows, gpu_experts
from vllm_exl3.format import Codebook, Exl3Tensors
from vllm_exl3.reference import decode_weight, moe_forward


@functools.cache
def decoded_experts(experts) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [experts, hidden, 2*width] and w2 [experts, width, hidden] in fp32; kept, the models are small."""
    decode = lambda *parts: decode_weight(Exl3Tensors(*parts, experts.codebook))
    w13, w2 = [], []
    for expert in range(experts.count):
        sides = [
            decode(*(getattr(experts, f"w13_{name}")[expert, side] for name in ("trellis", "suh", "svh")))
            for side in (0, 1)
        ]
        w13.append(torch.cat(sides, dim=1))
        w2.append(decode(*(getattr(experts, f"w2_{name}")[expert] for name in ("trellis", "suh", "svh"))))
    return torch.stack(w13), torch.stack(w2)


@functools.cache
def decoded_matrix(dense) -> torch.Tensor:
    (codebook,) = [c for c in Codebook if few_rows.codebook_flags(c) == tuple(dense.flags)]
    return decode_weight(Exl3Tensors(dense.trellis, dense.suh, dense.svh, codebook))


def run_experts(self, x, topk_ids, topk_weights, expert_map=None):
    w13, w2 = decoded_experts(self.experts)
    return moe_forward(x, w13, w2, topk_weights, topk_ids, self.limit, expert_map).to(x.dtype)


def apply_matrix(self, x):
    return (x.float() @ decoded_matrix(self)).to(x.dtype)


def install() -> None:
    """From here on every EXL3 layer of this process decodes and multiplies in fp32. For eager engines only."""
    gpu_experts.GpuExperts.run = run_experts
    few_rows.DenseExl3.apply = apply_matrix
