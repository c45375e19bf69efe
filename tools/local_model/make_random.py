"""Writes small random GLM-5.3-Flash checkpoints for tests: any matrix EXL3, any rate and codebook.

    PYTHONPATH=overlay python -m tools.local_model.make_random --out DIR --experts mcg4 --all-exl3

Random trellis words decode to near-Gaussian values, so suh and svh carry the scale. Scales are chosen
so that the next-token distribution depends on the context and is far from flat.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import re
from pathlib import Path

import torch
from vllm_exl3.format import HADAMARD_BLOCK, TILE, Codebook, Exl3Tensors, codebook_values, is_legal_rate

from tools.local_model import shapes
from tools.local_model.checkpoint import store_exl3, write_checkpoint
from tools.local_model.torchvision_ops import declare_missing_operators

# What exllamav3 quantises besides the experts. KDA's q, k and v become one fused tensor.
ALL_EXL3_RATES = {
    "layers.*.self_attn.[qkv]_proj": "mcg4",
    "layers.*.self_attn.o_proj": "mcg5",
    "layers.*.self_attn.q_[ab]_proj": "mcg4",
    "layers.*.self_attn.kv_a_proj_with_mqa": "mcg4",
    "layers.*.self_attn.indexer.wq_b": "mcg4",
    "layers.*.mlp.gate_proj": "mcg4",
    "layers.*.mlp.up_proj": "mcg4",
    "layers.*.mlp.down_proj": "mcg4",
    "layers.*.mlp.shared_experts.*": "mcg4",
    "lm_head": "mcg6",
}

Rate = tuple[Codebook, float]


def parse_rate(text: str) -> Rate:
    """'mcg4' -> (MCG, 4), 'mul12.5' -> (MUL1, 2.5), '3inst3' -> (3INST, 3)."""
    for codebook in Codebook:
        digits = text.removeprefix(codebook.value)
        if digits != text and re.fullmatch(r"[1-8](\.5)?", digits):
            bits = float(digits) if "." in digits else int(digits)
            if is_legal_rate(bits, codebook):
                return codebook, bits
    raise ValueError(
        f"rate {text!r}: expected a codebook (3inst, mcg, mul1) and bits 1..8, as in 'mcg4'; half bits "
        f"(1.5, 2.5, 3.5) exist for mul1 only."
    )


def write_random_model(
    path: str | Path,
    *,
    experts: str | None = "mcg4",
    dense: str | dict[str, str] | None = None,
    all_exl3: bool = False,
    namespace: str = "text",
    seed: int = 0,
    **config_overrides,
) -> dict:
    """Write a checkpoint and return its config.

    experts           rate of the routed experts; None keeps them native
    dense             rates of other matrices: module pattern -> rate, or one rate for all that
                      exllamav3 quantises
    all_exl3          exllamav3's own layout: `ALL_EXL3_RATES` (under `dense`), KDA fused, fp16 rest
    namespace         'text' or 'vl' (the latter with a tiny vision tower)
    config_overrides  fields of text_config, for instance vocab_size=512
    """
    if namespace not in shapes.NAMESPACES:
        raise ValueError(f"namespace {namespace!r}: expected one of {sorted(shapes.NAMESPACES)}.")
    # EXL3 sides must be whole Hadamard blocks, which a query rank of 64 is not. Few experts keep their
    # order clear (see `_separate_experts`).
    text = shapes.text_config(**{"q_lora_rank": 128, "n_routed_experts": 4} | config_overrides)
    rates = _dense_rates(dense, all_exl3)
    generator = torch.Generator().manual_seed(seed)
    tensors = _random_tensors(text, experts, rates, generator)
    if all_exl3:
        _fuse_kda(tensors, text, rates, generator)
        tensors = {n: t.half() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
    tensors = _add_namespace(tensors, shapes.NAMESPACES[namespace])
    config = shapes.model_config(text, _quantization(experts, rates, tensors), namespace)
    if namespace == "vl":
        tensors |= _random_vision(config, generator)
    write_checkpoint(Path(path), config, tensors)
    return config


def _dense_rates(dense: str | dict[str, str] | None, all_exl3: bool) -> dict[str, Rate]:
    """Module pattern -> rate; explicit patterns come first, so that they win."""
    if isinstance(dense, str):
        patterns = dict.fromkeys(ALL_EXL3_RATES, dense)
    else:
        patterns = dict(dense or {})
        if all_exl3:
            patterns |= {p: rate for p, rate in ALL_EXL3_RATES.items() if p not in patterns}
    return {pattern: parse_rate(rate) for pattern, rate in patterns.items()}


def _quantization(experts: str | None, rates: dict[str, Rate], tensors: dict) -> dict | None:
    if experts is None and not rates:
        return None
    codebook, bits = parse_rate(experts) if experts else next(iter(rates.values()))
    quantization = {"quant_method": "exl3", "bits": bits, "codebook": codebook.value}
    if not rates:
        return quantization | {"scope": shapes.EXPERTS_SCOPE}
    head = next((t for n, t in tensors.items() if n == "lm_head.trellis"), None)
    head_bits = 16 if head is None else head.shape[-1] / TILE
    return quantization | {"version": "1.6.5", "head_bits": int(head_bits), "out_scales": "auto"}


def _random_tensors(
    text: dict, experts: str | None, rates: dict[str, Rate], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """All tensors under HF's names without namespace, in layer order."""
    tensors = {n: _random_native(n, s, generator) for n, s in shapes.native_tensors(text).items()}
    # Gate and up of one routed expert share their input scales, as in the published packs.
    shared_suh: dict[str, torch.Tensor] = {}
    for module, linear in shapes.linear_modules(text).items():
        rate = _rate_of(module, experts, rates)
        std = _weight_std(module, linear)
        if rate is None:
            weight = torch.randn(linear.rows, linear.cols, generator=generator) * std
            tensors[f"{module}.weight"] = weight.bfloat16()
            continue
        shared = re.sub(r"\.(gate|up)_proj$", ".gate_up", module) if ".experts." in module else module
        suh = shared_suh.setdefault(shared, _random_scales(linear.cols, 1.0, generator))
        tensors |= store_exl3(module, _random_exl3(module, linear, rate, std, suh, generator))
    _separate_experts(tensors, text, generator)
    return tensors


def _rate_of(module: str, experts: str | None, rates: dict[str, Rate]) -> Rate | None:
    if shapes.is_routed_expert(module):
        return parse_rate(experts) if experts else None
    return next((rate for p, rate in rates.items() if fnmatch.fnmatchcase(module, p)), None)


def _weight_std(module: str, linear: shapes.Linear) -> float:
    """Unit-variance outputs from unit-variance inputs; a router that mostly obeys `_separate_experts`."""
    gain = 0.4 if module.endswith("mlp.gate") else 1.1 if module == "lm_head" else 1.0
    return gain / math.sqrt(linear.cols)


def _separate_experts(tensors: dict[str, torch.Tensor], text: dict, generator: torch.Generator) -> None:
    """Give every token a clear order of experts, written into the first channels of its embedding.

    Without it the second and third expert are often nearly equal, rounding swaps them, and a comparison
    of two engines would measure that and nothing else.
    """
    experts, embedding = text["n_routed_experts"], tensors["embed_tokens.weight"]
    order = torch.rand(embedding.shape[0], experts, generator=generator).argsort(-1)
    embedding[:, :experts] = 16 * (2 * order / (experts - 1) - 1)
    for name in [n for n in tensors if n.endswith("mlp.gate.weight")]:
        tensors[name][:, :experts] += 1.5 * torch.eye(experts)


def _random_scales(length: int, scale: float, generator: torch.Generator) -> torch.Tensor:
    sign = torch.randint(0, 2, (length,), generator=generator) * 2 - 1
    return (sign * scale * (0.8 + 0.4 * torch.rand(length, generator=generator))).half()


def _random_exl3(
    module: str,
    linear: shapes.Linear,
    rate: Rate,
    std: float,
    suh: torch.Tensor,
    generator: torch.Generator,
) -> Exl3Tensors:
    if linear.rows % HADAMARD_BLOCK or linear.cols % HADAMARD_BLOCK:
        raise ValueError(
            f"{module}: {linear.rows}x{linear.cols} cannot be EXL3, both sides must be multiples of "
            f"{HADAMARD_BLOCK}; choose another shape or leave this matrix native."
        )
    codebook, bits = rate
    shape = (linear.cols // TILE, linear.rows // TILE, round(TILE * bits))
    trellis = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
    scale = std / codebook_values(codebook).float().std().item()
    svh = _random_scales(linear.rows, scale, generator)
    return Exl3Tensors(trellis.to(torch.int16), suh, svh, codebook)


def _random_native(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "A_log" in name:
        value = 0.2 * noise
    elif "dt_bias" in name:
        value = -3 + 1.5 * noise
    elif name.endswith("e_score_correction_bias"):
        # An offset like the real checkpoint's: weights taken from biased scores come out wrong.
        value = 2 + 0.2 * noise
    elif "conv1d" in name:
        value = 0.5 * noise
    elif re.search(r"hc_(attn|ffn)_fn$", name):
        value = 0.2 * noise / math.sqrt(shape[-1])
    elif re.search(r"hc_(attn|ffn)_base$", name):
        value = 0.5 * noise
    elif re.search(r"(norm\.weight|layernorm\.weight|_scale)$", name):
        value = 1 + 0.1 * noise
    elif "index_kpool_compress_gate" in name:
        value = noise / math.sqrt(shape[-1])
    elif name.endswith(("k_norm.bias", "index_kpool_compress_ape")):
        value = 0.1 * noise
    elif name == "embed_tokens.weight":
        value = noise
    else:
        raise ValueError(f"{name}: no rule for its random values; add one here.")
    return value if shapes.is_kept_fp32(name) else value.bfloat16()


def _fuse_kda(tensors: dict[str, torch.Tensor], text: dict, rates: dict[str, Rate], generator: torch.Generator) -> None:
    """Replace KDA's q, k, v and their convolutions by exllamav3's `qkv_proj` and `conv1d`."""
    kda = text["linear_attn_config"]
    width, hidden = kda["head_dim"] * kda["num_heads"], text["hidden_size"]
    for index, kind in enumerate(text["layer_types"]):
        attention = f"layers.{index}.self_attn."
        rate = _rate_of(attention + "q_proj", None, rates)
        if kind != "linear_attention" or rate is None:
            continue
        for side in "qkv":
            for part in [n for n in tensors if n.startswith(f"{attention}{side}_proj.")]:
                del tensors[part]
        convs = [tensors.pop(f"{attention}{side}_conv1d.weight") for side in "qkv"]
        tensors[attention + "conv1d.weight"] = torch.cat(convs)
        fused, module = shapes.Linear(3 * width, hidden), attention + "qkv_proj"
        suh = _random_scales(hidden, 1.0, generator)
        weight = _random_exl3(module, fused, rate, hidden**-0.5, suh, generator)
        tensors |= store_exl3(module, weight)


def _add_namespace(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n if n.startswith("lm_head.") else prefix + n: t for n, t in tensors.items()}


def _random_vision(config: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors of the tiny vision tower under `model.visual.`, with transformers' shapes."""
    declare_missing_operators()
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextVisionConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextVisionModel

    with torch.device("meta"):
        tower = Glm5NextVisionModel(Glm5NextVisionConfig(**config["vision_config"]))
    tensors = {}
    for name, meta in sorted(tower.state_dict().items()):
        noise = 0.05 * torch.randn(meta.shape, generator=generator)
        is_norm = name.endswith("norm.weight") or re.search(r"norm\d\.weight$", name)
        tensors[f"model.visual.{name}"] = (noise + 1 if is_norm else noise).bfloat16()
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experts", default="mcg4", help="rate of the routed experts, e.g. mcg4, mul12.5")
    parser.add_argument("--dense", help="one rate for every other matrix that exllamav3 quantises")
    parser.add_argument("--all-exl3", action="store_true", help="exllamav3's own layout")
    parser.add_argument("--namespace", choices=sorted(shapes.NAMESPACES), default="text")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    write_random_model(args.pop("out"), **args)


if __name__ == "__main__":
    main()
