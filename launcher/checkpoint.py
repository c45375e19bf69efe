"""Looks at a checkpoint's files before anything is started: headers and sizes only, no weights are read."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from launcher import paths
from launcher.errors import LauncherError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
LONGEST_JSON_BYTES = 256 << 20  # an index names every tensor
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def check_checkpoint(folder: Path) -> None:
    """Raises LauncherError naming the file if the checkpoint cannot be served."""
    if not os.path.isdir(folder):
        raise LauncherError(f"{folder}: there is no such model folder; give one with --model, or restore it from git.")
    for name in NEEDED:
        if not os.path.isfile(folder / name):
            raise LauncherError(f"{folder / name}: the file is missing and a model needs it; {restore(folder)}")
    check_format(folder / "config.json")
    shards = read_index(folder)
    for shard, tensors in shards.items():
        check_shard(folder / shard, tensors)


def restore(folder: Path) -> str:
    return f"get it again: ./download.sh where that filled the folder, `git checkout -- {folder}` for the local model."


def read_json(path: Path) -> dict:
    try:
        content = json.loads(paths.text_of(path, LONGEST_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise LauncherError(f"{path}: not readable as JSON ({error}); {restore(path.parent)}") from error
    if not isinstance(content, dict):
        raise LauncherError(f"{path}: holds a {type(content).__name__} where an object belongs; {restore(path.parent)}")
    return content


def check_format(path: Path) -> None:
    config = read_json(path)
    text = config.get("text_config") or {}
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method != "exl3":
        raise LauncherError(
            f"{path}: quantization_config.quant_method is {method!r}, this server is for 'exl3'; "
            f"choose an EXL3 checkpoint with --model."
        )


def read_index(folder: Path) -> dict[str, set[str]]:
    """Shard file -> names of the tensors that the index expects in it (empty set: no index, anything goes)."""
    if not os.path.isfile(folder / INDEX):
        if not os.path.isfile(folder / SINGLE):
            raise LauncherError(f"{folder}: has neither {INDEX} nor {SINGLE}; {restore(folder)}")
        return {SINGLE: set()}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LauncherError(f"{folder / INDEX}: has no weight_map; {restore(folder)}")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise LauncherError(f"{folder / INDEX}: {tensor} is in {shard!r}, which is no file name; {restore(folder)}")
        shards.setdefault(shard, set()).add(tensor)
    return shards


def check_shard(path: Path, expected: set[str]) -> tuple[dict, int]:
    """As `read_header`, of a file whose size is what its header says and whose tensors are those of the index."""
    if not os.path.isfile(path):
        raise LauncherError(f"{path}: the index names this file and it is missing; {restore(path.parent)}")
    header, start = read_header(path)
    size = path.stat().st_size
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        what = f"{end - size} bytes are missing at the end" if size < end else f"{size - end} bytes too many"
        raise LauncherError(f"{path}: has {size} bytes, its header describes {end} ({what}); {restore(path.parent)}")
    if expected and expected != set(header):
        missing, extra = sorted(expected - set(header)), sorted(set(header) - expected)
        what = f"lacks {missing[0]}" if missing else f"also holds {extra[0]}"
        raise LauncherError(
            f"{path}: {what}, unlike the index ({len(missing)} missing, {len(extra)} extra); {restore(path.parent)}"
        )
    return header, start


def read_header(path: Path) -> tuple[dict, int]:
    """(tensor name -> entry, offset of the data) of a safetensors file."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            raw = file.read(length) if 0 < length <= MAX_HEADER_BYTES else b""
        header = json.loads(raw)
        header.pop("__metadata__", None)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end:
                raise ValueError(f"offsets {begin}, {end}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LauncherError(
            f"{path}: is no whole safetensors file, its header cannot be read; {restore(path.parent)}"
        ) from error
    return header, 8 + length
