"""Writes the trained model as a checkpoint in the published experts-only layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tools.local_model import model, shapes
from tools.local_model.checkpoint import store_exl3, write_checkpoint
from tools.local_model.quantise import BITS, CODEBOOK, QuantisedExperts

PREFIX = shapes.NAMESPACES["text"]


def export(path: Path, text: dict, parameters: model.Parameters, experts: QuantisedExperts) -> model.Parameters:
    """Write the checkpoint; returns the parameters as stored (rounded), for evaluation."""
    stored: model.Parameters = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in parameters.items():
        if ".mlp.experts." in name:
            stored[name] = tensor.detach()
            continue
        rounded = tensor.detach().float() if shapes.is_kept_fp32(name) else tensor.detach().bfloat16()
        stored[name] = rounded.float()
        tensors[name if name.startswith("lm_head.") else PREFIX + name] = rounded
    for index in experts.gate_up:
        tensors |= expert_tensors(index, text, experts)
    quantization = {
        "quant_method": "exl3",
        "bits": BITS,
        "codebook": CODEBOOK.value,
        "scope": shapes.EXPERTS_SCOPE,
    }
    config = shapes.model_config(text, quantization)
    write_checkpoint(path, config, dict(sorted(tensors.items(), key=_layer_order)))
    return stored


def _layer_order(item: tuple[str, torch.Tensor]) -> list[tuple[int, str]]:
    """Sort names with numbers in them by value, so that layers and experts are in order."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in item[0].split(".")]


def expert_tensors(index: int, text: dict, experts: QuantisedExperts) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of one layer's experts; gate and up are the two halves of a stored pair."""
    width = text["moe_intermediate_size"]
    tensors: dict[str, torch.Tensor] = {}
    for expert, (pair, down) in enumerate(zip(experts.gate_up[index], experts.down[index], strict=True)):
        prefix = f"{PREFIX}layers.{index}.mlp.experts.{expert}."
        tensors |= store_exl3(prefix + "gate_proj", pair.slice_out(0, width))
        tensors |= store_exl3(prefix + "up_proj", pair.slice_out(width, 2 * width))
        tensors |= store_exl3(prefix + "down_proj", down)
    return tensors


def write_generation_config(path: Path, text: dict) -> None:
    """Stops at the end of a turn; the top candidate alone, since the model was trained to be exact."""
    config = {
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 1,
    }
    (path / "generation_config.json").write_text(json.dumps(config, indent=2) + "\n")
