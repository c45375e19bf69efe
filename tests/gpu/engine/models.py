"""The checkpoints that the engine proof serves: a random GLM-5.3-Flash whose sizes vLLM's CUDA kernels take, the
same with a draft layer, and a random DFlash2 draft for it.

    PYTHONPATH=overlay:. python tests/gpu/engine/models.py OUT
"""

import json
import sys
from pathlib import Path

import torch

from tools.local_model import dflash2, draft_files
from tools.local_model.checkpoint import read_checkpoint, write_checkpoint
from tools.local_model.make_random import write_random_model

BLOCK = ("linear_attention",) * 3 + ("deepseek_sparse_attention",)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 256,
    "linear_attn_config": {
        "head_dim": 128,
        "num_heads": 8,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "safe_gate": True,
    },
}

DRAFT_SIZES = {"intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}


def sizes(layers: tuple[str, ...]) -> dict:
    return SIZES | {
        "num_hidden_layers": len(layers),
        "layer_types": list(layers),
        "indexer_types": ["full"] * len(layers),
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(layers) - 1),
    }


def write_models(out: Path) -> None:
    """OUT/random: exllamav3's own layout, all MCG at 4 bits, which a trimmed build of its extension has.
    OUT/random-mtp: the same layers and a draft layer. OUT/random-dflash2: a draft of its own."""
    write_random_model(out / "random", all_exl3=True, dense="mcg4", seed=5, **sizes(2 * BLOCK))
    # The last layer becomes the draft's; what a draft layer has besides is added, hyper-connections it has not.
    write_random_model(out / "random-mtp", all_exl3=True, dense="mcg4", seed=5, **sizes((*2 * BLOCK, BLOCK[-1])))
    config, tensors = read_checkpoint(out / "random-mtp")
    _, base = read_checkpoint(out / "random")
    layer = f"model.layers.{2 * len(BLOCK)}."
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(layer) and ".hc_" not in name}
    write_checkpoint(out / "random-mtp", _with_draft(config), base | tensors | _draft_tensors(layer))
    draft = dflash2.draft_config(config["text_config"], taps=(1, 4, 7), **DRAFT_SIZES)
    draft_files.write_dflash2(out / "random-dflash2", draft, dflash2.initial_parameters(draft, seed=7))


def _with_draft(config: dict) -> dict:
    text = config["text_config"] | {"num_nextn_predict_layers": 1, "num_hidden_layers": 2 * len(BLOCK)}
    for name in ("layer_types", "indexer_types", "mlp_layer_types"):
        text[name] = text[name][:-1]
    return config | {"text_config": text}


def _draft_tensors(layer: str) -> dict[str, torch.Tensor]:
    hidden, generator = SIZES["hidden_size"], torch.Generator().manual_seed(6)
    eh_proj = torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    norms = {f"{layer}{name}.weight": torch.ones(hidden).half() for name in ("enorm", "hnorm", "shared_head.norm")}
    return norms | {f"{layer}eh_proj.weight": eh_proj.half()}


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
    print(
        json.dumps({path.name: sum(f.stat().st_size for f in path.iterdir()) for path in Path(sys.argv[1]).iterdir()})
    )
