"""GLM-5.3-Flash's EXL3 checkpoint in its full size, as sparse files: real headers, no data, no room taken."""

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path

ITEM = {"I16": 2, "F16": 2, "BF16": 2, "F32": 4, "I32": 4}
HIDDEN, INNER, DENSE, VOCABULARY, EXPERTS, LAYERS, HEADS = 4096, 2048, 12_288, 154_880, 288, 45, 64
KDA = HEADS * 128
TEXT = {
    "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "intermediate_size": DENSE, "vocab_size": VOCABULARY,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
}  # fmt: skip
CONFIG = {
    "text_config": TEXT,
    "vision_config": {"num_heads": 16},
    "quantization_config": {"quant_method": "exl3", "bits": 4, "codebook": "mcg", "scope": "glm53_routed_experts_only"},
}
Entry = tuple[str, str, list[int]]


def exl3(stem: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{stem}.trellis", "I16", [rows // 16, columns // 16, 64]
    yield f"{stem}.suh", "F16", [rows]
    yield f"{stem}.svh", "F16", [columns]
    yield f"{stem}.mcg", "I32", []


def mlp(stem: str, inner: int) -> Iterator[Entry]:
    for side, shape in (("gate", [inner, HIDDEN]), ("up", [inner, HIDDEN]), ("down", [HIDDEN, inner])):
        yield f"{stem}.{side}_proj.weight", "BF16", shape


def kda(stem: str) -> Iterator[Entry]:
    for name in "qkv":
        yield f"{stem}.{name}_proj.weight", "BF16", [KDA, HIDDEN]
        yield f"{stem}.{name}_conv1d.weight", "F32", [KDA, 1, 4]
    for name, shape in {"f_a": [128, HIDDEN], "g_a": [128, HIDDEN], "f_b": [KDA, 128], "g_b": [KDA, 128],
                        "b": [HEADS, HIDDEN], "o": [HIDDEN, KDA]}.items():  # fmt: skip
        yield f"{stem}.{name}_proj.weight", "BF16", shape
    yield f"{stem}.A_log", "F32", [HEADS]
    yield f"{stem}.dt_bias", "F32", [KDA]
    yield f"{stem}.o_norm.weight", "BF16", [128]


def mla(stem: str) -> Iterator[Entry]:
    shapes = {
        "q_a_proj": [1536, HIDDEN], "q_b_proj": [HEADS * 256, 1536], "kv_a_proj_with_mqa": [512, HIDDEN],
        "kv_b_proj": [HEADS * 512, 512], "o_proj": [HIDDEN, HEADS * 256], "indexer.wq_b": [4096, 1536],
        "indexer.wk": [128, HIDDEN], "indexer.weights_proj": [32, HIDDEN],
    }  # fmt: skip
    for name, shape in shapes.items():
        yield f"{stem}.{name}.weight", "BF16", shape


def layer(number: int) -> Iterator[Entry]:
    stem = f"model.language_model.layers.{number}"
    yield from mla(f"{stem}.self_attn") if number % 4 == 3 or number == LAYERS else kda(f"{stem}.self_attn")
    for name in ("attn", "ffn"):
        yield f"{stem}.hc_{name}_fn", "BF16", [24, 4 * HIDDEN]
    if number < 3:
        yield from mlp(f"{stem}.mlp", DENSE)
        return
    yield f"{stem}.mlp.gate.weight", "F32", [EXPERTS, HIDDEN]
    yield from mlp(f"{stem}.mlp.shared_experts", INNER)
    for expert in range(EXPERTS):
        for side in ("gate", "up"):
            yield from exl3(f"{stem}.mlp.experts.{expert}.{side}_proj", HIDDEN, INNER)
        yield from exl3(f"{stem}.mlp.experts.{expert}.down_proj", INNER, HIDDEN)


def entries() -> Iterator[Entry]:
    yield "model.language_model.embed_tokens.weight", "BF16", [VOCABULARY, HIDDEN]
    yield "lm_head.weight", "BF16", [VOCABULARY, HIDDEN]
    for number in range(LAYERS + 1):
        yield from layer(number)
    for number in range(24):
        yield f"model.visual.blocks.{number}.attn.qkv.weight", "BF16", [4608, 1536]
        yield f"model.visual.blocks.{number}.norm1.weight", "BF16", [1536]


def write(folder: Path, shards: int = 120, ledger: bool = False) -> int:
    """Bytes of all shards. `ledger`: config.json carries its list of tensors, as published ones do."""
    folder.mkdir(parents=True)
    everything = list(entries())
    per_shard = -(-len(everything) // shards)
    weight_map, total = {}, 0
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = everything[number * per_shard : (number + 1) * per_shard]
        total += write_shard(folder / name, part)
        weight_map |= {tensor: name for tensor, _, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = CONFIG | {"quantization_config": CONFIG["quantization_config"] | (ledger_of(everything) if ledger else {})}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def write_shard(path: Path, part: list[Entry]) -> int:
    header, position = {}, 0
    for name, dtype, shape in part:
        size = prod(shape) * ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + position)
    return 8 + len(raw) + position


def ledger_of(everything: list[Entry]) -> dict:
    storage: dict[str, dict] = {}
    for name, dtype, shape in everything:
        module = storage.setdefault(name.rpartition(".")[0], {"stored_tensors": {}, "quant_format": "exl3"})
        stored = {"shape": shape, "n_bytes": prod(shape) * ITEM[dtype], "dtype": f"torch.{dtype}"}
        module["stored_tensors"][name] = stored
    return {"tensor_storage": storage}
