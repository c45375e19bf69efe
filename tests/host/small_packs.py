"""Small checkpoints that look like the real ones from outside: shards, index, config, in bytes that a seed decides."""

import json
import random
import struct
from pathlib import Path

from hub_server import HubServer, git_sha1, is_large, sha256

from launcher.weights.packs import Pack

TRELLIS = ("I16", [8, 8, 64], 8 * 8 * 64 * 2)
SIDE = ("F16", [128], 256)
MARKER = ("I32", [], 4)
REVISION, STALE = "a" * 40, "5" * 40


def safetensors(entries: dict[str, tuple[str, list[int], int]], fill) -> bytes:
    """`entries`: name -> (dtype, shape, bytes); `fill(count)` gives the data."""
    header, position = {}, 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + fill(position)


def expert(layer: int, number: int = 0) -> dict[str, tuple[str, list[int], int]]:
    found = {}
    for side in ("gate", "up", "down"):
        stem = f"model.language_model.layers.{layer}.mlp.experts.{number}.{side}_proj"
        parts = {"trellis": TRELLIS, "suh": SIDE, "svh": SIDE, "mcg": MARKER}
        found |= {f"{stem}.{part}": entry for part, entry in parts.items()}
    return found


def model_files(shards: int, filler: int = 0, seed: int = 0) -> dict[str, bytes]:
    """Each shard holds one expert of its own layer and `filler` bytes of norms."""
    fill = random.Random(seed).randbytes
    files, weight_map = {}, {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        norm = f"model.language_model.layers.{number}.input_layernorm.weight"
        entries = expert(number) | ({norm: ("BF16", [filler // 2], filler)} if filler else {})
        files[name] = safetensors(entries, fill)
        weight_map |= dict.fromkeys(entries, name)
    config = {"quantization_config": {"quant_method": "exl3", "bits": 4, "codebook": "mcg",
                                      "scope": "glm53_routed_experts_only"}}  # fmt: skip
    files |= {
        "config.json": json.dumps(config).encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "tokenizer.json": b"{}",
        "assets/notes.md": b"# Notes\n",
    }
    return files


def draft_files(seed: int = 9) -> dict[str, bytes]:
    norm = {"norm.weight": ("BF16", [4096], 8192)}
    return {"model.safetensors": safetensors(norm, random.Random(seed).randbytes), "config.json": b"{}"}


def packs(shards: int) -> tuple[Pack, ...]:
    """The table of tests: two with the same bytes, another one, a draft."""
    return (
        Pack("first/model", REVISION, shards, 10**6, "Apache-2.0", content="same"),
        Pack("second/model", "b" * 40, shards, 10**6, "ShapleyMCG", restricts="read its terms", content="same"),
        Pack("third/model", "c" * 40, shards + 1, 10**6, "Apache-2.0"),
        Pack("some/draft", "d" * 40, 1, 10**4, "CC BY-NC-ND 4.0", kind="draft", restricts="no commercial use"),
    )


def publish(hub: HubServer, table: tuple[Pack, ...], files: dict[str, bytes]) -> None:
    """All packs of the table, of which the first two are the given files."""
    for pack in table:
        if pack.kind == "draft":
            content = draft_files()
        else:
            content = files if pack.content else model_files(pack.shards, seed=77)
        hub.repos[pack.id] = {pack.revision: content | {".gitattributes": b"*.safetensors filter=lfs\n"}}


def fill_cache(root: Path, pack: Pack, files: dict[str, bytes], revision: str = "") -> Path:
    """As the Hub's own library lays it out: blobs by hash, a folder of links for the revision."""
    base = root / f"models--{pack.id.replace('/', '--')}"
    snapshot = base / "snapshots" / (revision or pack.revision)
    for name, content in files.items():
        blob = base / "blobs" / (sha256(content) if is_large(name) else git_sha1(content))
        blob.parent.mkdir(parents=True, exist_ok=True)
        if not blob.exists():
            blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        depth = len(link.relative_to(base).parts) - 1
        link.symlink_to("../" * depth + f"blobs/{blob.name}")
    return snapshot


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Everything that is served: nothing hidden."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)}  # fmt: skip
