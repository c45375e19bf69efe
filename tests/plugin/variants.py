"""The local model in exllamav3's own layout: every matrix that exllamav3 quantises is EXL3."""

import fnmatch
import json
from pathlib import Path

import torch
from vllm_exl3.format import HADAMARD_BLOCK, TILE, Codebook, Exl3Tensors, codebook_values, pack_states, ring_to_tile
from vllm_exl3.reference import transform_blocks

from tools.local_model.checkpoint import read_checkpoint, store_exl3, write_checkpoint
from tools.local_model.make_random import ALL_EXL3_RATES

BITS = 8
LOW = 2**BITS - 1


def write_all_exl3(source: Path, target: Path) -> None:
    """Quantise the dense matrices of `source` to 8 bits (the head with MUL1), fuse KDA's q, k and v."""
    config, stored = read_checkpoint(source)
    tensors = fuse_kda(stored, config["text_config"]["layer_types"])
    generator = torch.Generator().manual_seed(0)
    for name in sorted(name for name in tensors if name.endswith(".weight")):  # a file tells them in any order
        module = name.removesuffix(".weight")
        if any(fnmatch.fnmatchcase(module.removeprefix("model."), p) for p in (*ALL_EXL3_RATES, "*.qkv_proj")):
            codebook = Codebook.MUL1 if module == "lm_head" else Codebook.MCG
            tensors |= store_exl3(module, quantise(tensors.pop(name).float().T, codebook, generator))
    settings = {"quant_method": "exl3", "version": "1.6.5", "bits": 4.6, "head_bits": 8, "codebook": "mcg"}
    holder = config if "quantization_config" in config else config["text_config"]
    holder["quantization_config"] = settings
    write_checkpoint(target, config, tensors)
    for file in source.glob("*.json*"):
        if not (target / file.name).exists():
            (target / file.name).write_bytes(file.read_bytes())
    (target / "chat_template.jinja").write_bytes((source / "chat_template.jinja").read_bytes())
    assert json.loads((target / "config.json").read_text())


def fuse_kda(stored: dict[str, torch.Tensor], layer_types: list[str]) -> dict[str, torch.Tensor]:
    tensors = dict(stored)
    for layer in [i for i, kind in enumerate(layer_types) if kind == "linear_attention"]:
        attention = f"model.layers.{layer}.self_attn"
        for parts, fused in (("{}_proj", "qkv_proj"), ("{}_conv1d", "conv1d")):
            sides = [tensors.pop(f"{attention}.{parts.format(side)}.weight") for side in "qkv"]
            tensors[f"{attention}.{fused}.weight"] = torch.cat(sides)
    return tensors


def quantise(weight: torch.Tensor, codebook: Codebook, generator: torch.Generator) -> Exl3Tensors:
    """weight [in, out], padded with zeros to whole Hadamard blocks; random signs, one scale."""
    rows, columns = (-(-size // HADAMARD_BLOCK) * HADAMARD_BLOCK for size in weight.shape)
    padded = torch.zeros(rows, columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = padded.square().mean().sqrt() / codebook_values(codebook).float().std()
    suh, svh = ((torch.randint(0, 2, (n,), generator=generator) * 2 - 1).float() for n in (rows, columns))
    suh = (suh * scale).half()
    inner = transform_blocks(transform_blocks((padded / suh.float()[:, None] * svh).T).T)
    tiles = inner.unflatten(0, (-1, TILE)).unflatten(-1, (-1, TILE)).transpose(1, 2).flatten(2)
    states = choose_states(tiles[..., ring_to_tile()].flatten(0, 1), codebook)
    trellis = pack_states(states, BITS).view(rows // TILE, columns // TILE, -1)
    return Exl3Tensors(trellis, suh, svh.half(), codebook)


def choose_states(ring: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Ring targets [tiles, 256] -> states. At 8 bits a state is the byte before and its own.

    Each byte is the best after the one before; only the last two share the cost of closing the ring at 0.
    """
    table = codebook_values(codebook).float().view(2**BITS, 2**BITS)
    byte = torch.zeros(len(ring), dtype=torch.int64)
    bytes_ = []
    for target in ring[:, :-2].T:
        byte = (table[byte] - target[:, None]).square().argmin(-1)
        bytes_.append(byte)
    cost = (table[byte] - ring[:, -2:-1]).square() + (table[:, 0][None] - ring[:, -1:]).square()
    bytes_ += [cost.argmin(-1), torch.zeros_like(byte)]
    own = torch.stack(bytes_, dim=-1)
    return (own.roll(1, -1) << BITS) | own
