"""Damage to the headers of the local model, and what the launcher says to it. The plugin has to refuse the same."""

import json
import shutil
import struct
from pathlib import Path

LOCAL = Path(__file__).resolve().parents[2] / "models" / "local"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.0.gate_proj"


def copy_local(folder: Path) -> Path:
    shutil.copytree(LOCAL, folder)
    return folder


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def read(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: dict, data: bytes) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def set_entry(tensor: str, **fields):
    """The tensor's entry says something else; its bytes stay where they are."""

    def damage(folder: Path) -> None:
        path = shard_of(folder, tensor)
        header, data = read(path)
        header[tensor] |= fields
        write(path, header, data)

    return damage


def rename(tensor: str, to: str):
    """In the header and in the index."""

    def damage(folder: Path) -> None:
        path = shard_of(folder, tensor)
        header, data = read(path)
        header[to] = header.pop(tensor)
        write(path, header, data)
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][to] = index["weight_map"].pop(tensor)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def drop(tensor: str):
    """From the header, the data behind it and the index: a checkpoint that was converted without it."""

    def damage(folder: Path) -> None:
        path = shard_of(folder, tensor)
        header, data = read(path)
        begin, end = header.pop(tensor)["data_offsets"]
        for name, entry in header.items():
            if name != "__metadata__" and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [position - (end - begin) for position in entry["data_offsets"]]
        write(path, header, data[:begin] + data[end:])
        index = json.loads((folder / INDEX).read_text())
        del index["weight_map"][tensor]
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def only_in_index(folder: Path) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.x"] = index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))


def cut(folder: Path) -> None:
    path = shard_of(folder, f"{EXPERT}.trellis")
    path.write_bytes(path.read_bytes()[:-1])


def claim(**claims):
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= claims
        (folder / "config.json").write_text(json.dumps(config))

    return damage


DAMAGE = {
    "a byte is missing": (cut, r"has \d+ bytes, its header describes \d+"),
    "only in the index": (only_in_index, r"lacks model.layers.9.x, unlike the index"),
    "trellis of another type": (set_entry(f"{EXPERT}.trellis", dtype="F16"), r"trellis is F16 .*, I16 .* is expected"),
    "trellis of two dimensions": (set_entry(f"{EXPERT}.trellis", shape=[8, 1024]), r"trellis is I16 \[8, 1024\]"),
    "trellis of another rate": (set_entry(f"{EXPERT}.trellis", shape=[8, 64, 16]), r"F16 \[1024\].* is expected"),
    "half the columns": (set_entry(f"{EXPERT}.trellis", shape=[8, 8, 128]), r"svh is F16 \[256\], F16 \[128\]"),
    "half a bit": (set_entry(f"{EXPERT}.trellis", shape=[64, 16, 8]), r"has 0.5 bits a weight, which the codebook mcg"),
    "suh of another type": (set_entry(f"{EXPERT}.suh", dtype="BF16"), r"suh is BF16 \[128\], F16 \[128\]"),
    "svh of another shape": (set_entry(f"{EXPERT}.svh", shape=[2, 128]), r"svh is F16 \[2, 128\], F16 \[256\]"),
    "marker of another type": (set_entry(f"{EXPERT}.mcg", dtype="F32"), r"mcg is F32 \[\], an I32 scalar"),
    "no suh": (drop(f"{EXPERT}.suh"), r"gate_proj.suh is missing beside mcg, svh, trellis"),
    "no trellis": (drop(f"{EXPERT}.trellis"), r"gate_proj.trellis is missing beside"),
    "no marker": (drop(f"{EXPERT}.mcg"), r"says codebook mcg, .*gate_proj has 3inst"),
    "signs of an early version": (rename(f"{EXPERT}.suh", f"{EXPERT}.su"), r"suh is missing|su is of an early"),
    "two forms": (rename("model.norm.weight", f"{EXPERT}.weight"), r"stands beside a .weight"),
    "another rate than config.json says": (claim(bits=3), r"says bits 3, layers.1.mlp.experts.0.\w+_proj has 4"),
    "another codebook than config.json says": (claim(codebook="mul1"), r"says codebook mul1, .* has mcg"),
}  # fmt: skip
