"""The drafts as files that vLLM loads: a DFlash2 folder, and an MTP layer that joins the local model's own files.

PYTHONPATH=overlay python -m tools.local_model.draft_files /tmp/local-mtp
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tools.local_model import shapes
from tools.local_model.checkpoint import INDEX, CheckpointError
from tools.local_model.model import Parameters

LAYER_FILE = "mtp.safetensors"
PREFIX = shapes.NAMESPACES["text"]


def rounded(parameters: Parameters) -> Parameters:
    """As they are stored, in fp32; experts stay as EXL3 decodes to."""
    return {
        name: tensor if name.startswith("mlp.experts.") or shapes.is_kept_fp32(name) else tensor.bfloat16().float()
        for name, tensor in parameters.items()
    }


def write_dflash2(path: Path, config: dict, parameters: Parameters) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in parameters.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def read_dflash2(path: Path) -> tuple[dict, Parameters]:
    """(config, parameters in fp32)."""
    tensors = load_file(path / "model.safetensors")
    return json.loads((path / "config.json").read_text()), {name: tensor.float() for name, tensor in tensors.items()}


def write_layer(path: Path, model: Path, parameters: Parameters) -> None:
    """The MTP layer of the checkpoint `model`, by itself; its experts are copies of the last layer's EXL3 tensors."""
    text = json.loads((model / "config.json").read_text())["text_config"]
    layer = f"{PREFIX}layers.{text['num_hidden_layers']}."
    tensors = {
        layer + name: tensor.detach().float().cpu() if shapes.is_kept_fp32(name) else tensor.detach().bfloat16().cpu()
        for name, tensor in parameters.items()
        if not name.startswith("mlp.experts.")
    }
    last = f"{PREFIX}layers.{text['num_hidden_layers'] - 1}."
    tensors |= {name.replace(last, layer): tensor for name, tensor in _stored_experts(model, last).items()}
    path.mkdir(parents=True, exist_ok=True)
    # Copies, because safetensors refuses tensors that share memory.
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(copies, path / LAYER_FILE, metadata={"format": "pt"})


def read_layer(path: Path, text: dict, target: Parameters) -> Parameters:
    """The layer's parameters in fp32; its experts, decoded, are those of the target's last layer."""
    first, last = f"{PREFIX}layers.{text['num_hidden_layers']}.", f"layers.{text['num_hidden_layers'] - 1}."
    experts = {
        name.removeprefix(last): tensor for name, tensor in target.items() if name.startswith(f"{last}mlp.experts.")
    }
    stored = load_file(path / LAYER_FILE)
    return experts | {name.removeprefix(first): t.float() for name, t in stored.items() if ".mlp.experts." not in name}


def _stored_experts(model: Path, layer: str) -> dict[str, torch.Tensor]:
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    names = [name for name in weight_map if name.startswith(layer + "mlp.experts.")]
    tensors = {}
    for file in sorted({weight_map[name] for name in names}):
        with safe_open(model / file, framework="pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in names if weight_map[name] == file}
    return tensors


def join(out: Path, model: Path, layer: Path) -> None:
    """A checkpoint in `out` of the files of `model`, as links, and the MTP layer's file."""
    config = json.loads((model / "config.json").read_text())
    if config["text_config"]["num_nextn_predict_layers"]:
        raise CheckpointError(f"{model / 'config.json'}: has a draft layer already, expected none to join {layer} to.")
    index = json.loads((model / INDEX).read_text())
    with safe_open(layer / LAYER_FILE, framework="pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}
    first = f"{PREFIX}layers.{config['text_config']['num_hidden_layers']}."
    strange = [name for name in sizes if not name.startswith(first)]
    if strange:
        raise CheckpointError(
            f"{layer / LAYER_FILE}: holds {strange[0]}, expected only {first}*. Train the drafts again."
        )
    out.mkdir(parents=True, exist_ok=True)
    for file in [*model.iterdir(), layer / LAYER_FILE]:
        if file.is_file() and file.name not in ("config.json", INDEX, "README.md"):
            (out / file.name).unlink(missing_ok=True)
            os.symlink(file.resolve(), out / file.name)
    config["text_config"]["num_nextn_predict_layers"] = 1
    index["weight_map"] |= dict.fromkeys(sizes, LAYER_FILE)
    index["metadata"]["total_size"] += sum(sizes.values())
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to make: the model's files as links, and its MTP layer")
    parser.add_argument("--model", type=Path, default=Path("models/local"))
    parser.add_argument("--layer", type=Path, default=Path("models/local-drafts/mtp"))
    args = parser.parse_args()
    join(args.out, args.model, args.layer)


if __name__ == "__main__":
    main()
