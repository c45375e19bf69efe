"""The header pass: what every safetensors file of a folder says of itself, held against the index and the EXL3 format.

Headers and sizes alone are read, one shard at a time, so that memory does not grow with the checkpoint. What is refused
here is what the plugin would refuse when it loads (overlay/vllm_exl3/checkpoint.py, format.py), an hour earlier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from launcher import paths
from launcher.checkpoint import LONGEST_JSON_BYTES, check_shard, read_index, restore
from launcher.errors import LauncherError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
TILE, HADAMARD = 16, 128
PARTS = ("trellis", "suh", "svh", "mcg", "mul1")
MARKERS = ("mcg", "mul1")
OLD_PARTS = ("su", "sv")
RATES = {"mul1": (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)}
WHOLE_RATES = tuple(range(1, 9))
EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj")


@dataclass(frozen=True)
class Tensor:
    """What a header says of one tensor. `start`: of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    shard: str
    start: int


@dataclass(frozen=True)
class Exl3:
    """One EXL3 weight: padded sizes, rate and codebook; `bytes` of all its tensors, `sides` of suh and svh."""

    in_features: int
    out_features: int
    bits: float
    codebook: str
    bytes: int


def canonical(name: str) -> str:
    """Without the namespace, in which the layouts differ."""
    return re.sub(r"^(language_model\.|model\.)+", "", name)


# Tensors


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name on the disk; checks files, offsets and the index on the way."""
    seen: dict[str, str] = {}
    for shard, expected in sorted(read_index(folder).items()):
        path = folder / shard
        header, start = check_shard(path, expected)
        check_layout(path, header)
        for name, entry in header.items():
            if seen.setdefault(name, shard) != shard:
                raise LauncherError(f"{path}: {name} is in {seen[name]} too, it belongs in one; {restore(folder)}")
            begin, end = entry["data_offsets"]
            yield name, Tensor(entry["dtype"], tuple(entry["shape"]), end - begin, shard, start + begin)


def check_layout(path: Path, header: Mapping[str, Mapping]) -> None:
    """Tensors lie one behind the other without a gap, each as long as its shape says."""
    position, name = 0, ""
    try:
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            entry = header[name]
            begin, end = entry["data_offsets"]
            length = prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]]
            if begin != position or end - begin != length:
                raise LauncherError(
                    f"{path}: {name} lies at {begin} to {end}, {entry['dtype']} {entry['shape']} belongs at {position} "
                    f"to {position + length}; {restore(path.parent)}"
                )
            position = end
    except (KeyError, TypeError, ValueError) as error:
        raise LauncherError(
            f"{path}: its header has no usable entry for {name} ({error!r}); {restore(path.parent)}"
        ) from error


# EXL3


def exl3_modules(found: Iterator[tuple[str, Tensor]]) -> dict[str, Exl3]:
    """Canonical module -> its weight. Raises LauncherError naming the tensor that does not fit the others."""
    parts: dict[str, dict[str, Tensor]] = {}
    native = set()
    for name, tensor in found:
        module, _, last = canonical(name).rpartition(".")
        if last in (*PARTS, *OLD_PARTS):
            parts.setdefault(module, {})[last] = tensor
        elif last == "weight":
            native.add(module)
    return {module: exl3_of(module, tensors_of, module in native) for module, tensors_of in parts.items()}


def exl3_of(module: str, parts: Mapping[str, Tensor], has_weight: bool) -> Exl3:
    def refuse(part: str, what: str) -> LauncherError:
        shard = parts[part].shard if part in parts else next(iter(parts.values())).shard
        return LauncherError(f"{shard}: {module}.{part} {what}; the checkpoint is damaged or of another format.")

    for part in ("trellis", "suh", "svh"):
        if part not in parts:
            raise refuse(part, f"is missing beside {', '.join(sorted(parts))}")
    for part in OLD_PARTS:
        if part in parts:
            raise refuse(part, "is of an early exllamav3; convert the model again")
    if has_weight:
        raise refuse("trellis", "stands beside a .weight, one of them is expected")
    markers = [name for name in MARKERS if name in parts]
    if len(markers) == 2:
        raise refuse("mcg", "stands beside mul1, one codebook is expected")
    for name in markers:
        if parts[name].dtype != "I32" or parts[name].shape not in ((), (1,)):
            raise refuse(name, f"is {parts[name].dtype} {list(parts[name].shape)}, an I32 scalar is expected")
    codebook = markers[0] if markers else "3inst"
    trellis = parts["trellis"]
    if trellis.dtype != "I16" or len(trellis.shape) != 3:
        raise refuse("trellis", f"is {trellis.dtype} {list(trellis.shape)}, I16 [in/16, out/16, 16*K] is expected")
    bits = trellis.shape[2] / TILE
    if bits not in RATES.get(codebook, WHOLE_RATES):
        raise refuse("trellis", f"has {bits:g} bits a weight, which the codebook {codebook} does not have")
    sides = {"suh": trellis.shape[0] * TILE, "svh": trellis.shape[1] * TILE}
    for part, length in sides.items():
        if parts[part].dtype != "F16" or parts[part].shape != (length,) or length % HADAMARD:
            wanted = f"F16 [{length}], a multiple of {HADAMARD}, is expected beside a trellis of {list(trellis.shape)}"
            raise refuse(part, f"is {parts[part].dtype} {list(parts[part].shape)}, {wanted}")
    return Exl3(*sides.values(), bits, codebook, sum(tensor.bytes for tensor in parts.values()))


# config.json


def read_config(path: Path) -> dict:
    """Without its ledger of tensors, which can be larger than all the rest and says what the headers say."""
    try:
        config = json.loads(paths.text_of(path, LONGEST_JSON_BYTES), object_pairs_hook=without_ledger)
    except (OSError, ValueError, RecursionError) as error:
        raise LauncherError(f"{path}: not readable as JSON ({error}); ./download.sh fetches it again.") from error
    if not isinstance(config, dict):
        raise LauncherError(f"{path}: holds no object; ./download.sh fetches it again.")
    return config


def without_ledger(pairs: list) -> dict:
    """Called for the innermost object first, so that the ledger never exists as a whole."""
    return {name: value for name, value in pairs if name not in ("tensor_storage", "stored_tensors")}


def text_config(config: Mapping) -> Mapping:
    return config.get("text_config") or config


def quantization(config: Mapping) -> Mapping:
    return config.get("quantization_config") or text_config(config).get("quantization_config") or {}


def check_claims(folder: Path, config: Mapping, modules: Mapping[str, Exl3]) -> None:
    claims = quantization(config)
    if claims.get("quant_method") != "exl3" or not modules:
        raise LauncherError(
            f"{folder / 'config.json'}: quant_method is {claims.get('quant_method')!r} and {len(modules)} tensors are "
            f"EXL3; this server is for EXL3 checkpoints. Set MODEL_DIR to one."
        )
    if claims.get("scope") != "glm53_routed_experts_only":
        return
    for module, weight in modules.items():
        if EXPERT.fullmatch(module):
            for key, got in (("bits", weight.bits), ("codebook", weight.codebook)):
                if claims.get(key, got) != got:
                    raise LauncherError(
                        f"{folder / 'config.json'}: says {key} {claims[key]}, {module} has {got}; one of the files is "
                        f"of another checkpoint."
                    )


def check_experts(folder: Path, config: Mapping, modules: Mapping[str, Exl3]) -> None:
    """Every layer that has experts has all, with the sizes of config.json."""
    text = text_config(config)
    hidden, inner, count = (text.get(key) for key in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    if not (hidden and inner and count):
        return
    layers: dict[str, set[tuple[int, str]]] = {}
    for module, weight in modules.items():
        found = EXPERT.fullmatch(module)
        if not found:
            continue
        layers.setdefault(found[1], set()).add((int(found[2]), found[3]))
        wanted = (inner, hidden) if found[3] == "down" else (hidden, inner)
        if (weight.in_features, weight.out_features) != wanted:
            raise LauncherError(
                f"{folder}: {module} is {weight.in_features} x {weight.out_features}, config.json wants {wanted[0]} x "
                f"{wanted[1]}; one of the files is of another checkpoint."
            )
    for layer, found in layers.items():
        absent = {(expert, side) for expert in range(count) for side in ("gate", "up", "down")} ^ found
        if absent:
            expert, side = min(absent)
            raise LauncherError(
                f"{folder}: {layer} has {len(found)} of {3 * count} EXL3 matrices, {expert}.{side}_proj is the odd "
                f"one; the checkpoint is incomplete."
            )


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor -> shard of an index file."""
    return {tensor: shard for shard, names in read_index(path.parent).items() for tensor in names}
