"""Reads and writes checkpoint directories: config.json, safetensors shards and their index."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm_exl3.format import Codebook, Exl3Tensors, check_marker, shape_from_headers

INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {torch.int16: "I16", torch.int32: "I32", torch.float16: "F16"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names file or tensor and what was expected."""


def write_checkpoint(path: Path, config: dict, tensors: dict[str, torch.Tensor], shards: int = 2) -> None:
    """Write `tensors` into `shards` files of about equal size, with config.json and the index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    files = _split(tensors, shards)
    weight_map = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # Copies, because safetensors refuses tensors that share memory (suh of gate and up).
        part = {name: tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in names}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split(tensors: dict[str, torch.Tensor], shards: int) -> list[list[str]]:
    """Names in order, cut where the running size passes each shard's share."""
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    files: list[list[str]] = [[] for _ in range(shards)]
    done = 0
    for name, tensor in tensors.items():
        files[min(done * shards // total, shards - 1)].append(name)
        done += tensor.numel() * tensor.element_size()
    return [names for names in files if names]


def read_checkpoint(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """(config, tensors) of a directory; index and shards must list the same tensors."""
    config = json.loads((path / "config.json").read_text())
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(path / file, framework="pt") as shard:
            names = set(shard.keys())
            listed = {name for name, where in weight_map.items() if where == file}
            if names != listed:
                raise CheckpointError(
                    f"{path / file}: {INDEX} lists {len(listed)} tensors for it, the file has {len(names)}; "
                    f"they differ in {sorted(names ^ listed)[:3]}. Copy the checkpoint again."
                )
            tensors |= {name: shard.get_tensor(name) for name in names}
    return config, tensors


def exl3_modules(tensors: dict[str, torch.Tensor]) -> dict[str, Exl3Tensors]:
    """Every module stored as EXL3, checked: shapes, dtypes, rate, and its codebook marker's value."""
    modules = sorted(name.removesuffix(".trellis") for name in tensors if name.endswith(".trellis"))
    return {module: _exl3_tensors(module, tensors) for module in modules}


def _exl3_tensors(module: str, tensors: dict[str, torch.Tensor]) -> Exl3Tensors:
    parts = {
        name.removeprefix(module + "."): tensor for name, tensor in tensors.items() if name.startswith(module + ".")
    }
    headers = {name: (_DTYPE_NAMES.get(part.dtype, str(part.dtype)), tuple(part.shape)) for name, part in parts.items()}
    codebook = shape_from_headers(module, headers).codebook
    if codebook.marker is not None:
        check_marker(f"{module}.{codebook.marker}", parts[codebook.marker], codebook)
    return Exl3Tensors(parts["trellis"], parts["suh"], parts["svh"], codebook)


def store_exl3(module: str, weight: Exl3Tensors) -> dict[str, torch.Tensor]:
    """The checkpoint tensors of one EXL3 weight."""
    stored = {
        f"{module}.trellis": weight.trellis,
        f"{module}.suh": weight.suh,
        f"{module}.svh": weight.svh,
    }
    if weight.codebook is not Codebook.THREE_INST:
        marker = torch.tensor(weight.codebook.marker_value, dtype=torch.int32)
        stored[f"{module}.{weight.codebook.marker}"] = marker
    return stored
