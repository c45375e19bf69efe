"""What a checkpoint holds, read from its safetensors headers: which modules are EXL3, which are native.

No weight is read and nothing is guessed from a configuration; every claim of `config.json` is compared
with the headers. No vLLM import.
"""

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_exl3.format import Exl3FormatError, TensorShape, shape_from_headers

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit

EXL3_SUFFIXES = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")

# The layers of vLLM that hold several matrices of the checkpoint, in the order of their output shards.
FUSED_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wk_weights_proj": ("wk", "weights_proj"),
    "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
}
KDA_FUSED = "qkv_proj"  # exllamav3 stores KDA's q, k and v as one matrix

# Every module that this plugin can load as EXL3. `kv_b_proj`, which MLA absorbs, is not among them.
_LOADABLE = re.compile(
    r"lm_head"
    r"|layers\.\d+\.mlp\.(shared_experts\.|experts\.\d+\.)?(gate|up|down)_proj"
    r"|layers\.\d+\.self_attn\.(q|k|v|o|qkv|q_a|q_b|f_b|g_b)_proj"
    r"|layers\.\d+\.self_attn\.(kv_a_proj_with_mqa|indexer\.wq_b)"
    r"|layers\.\d+\.eh_proj"
)
_ROUTED_EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj")

ROUTED_EXPERTS_SCOPE = "glm53_routed_experts_only"


class Exl3LoadError(Exl3FormatError):
    """A checkpoint that cannot be served as it is; the message names the tensor and what was expected."""


def canonical(name: str) -> str:
    """A name without the namespace: both checkpoint layouts and vLLM's module paths give the same.

    `model.language_model.layers.3.x` (vision checkpoint), `model.layers.3.x` (text only),
    `language_model.model.layers.3.x` (vLLM) and `model.layers.45.mtp_block.x` (vLLM's draft layer).
    """
    return re.sub(r"^(language_model\.|model\.)+", "", name).replace(".mtp_block.", ".")


@dataclass(frozen=True)
class Layout:
    """The modules of a checkpoint under their canonical names."""

    exl3: dict[str, TensorShape]
    native: frozenset[str]  # tensor names

    def is_native(self, module: str) -> bool:
        return f"{module}.weight" in self.native

    def expert_ids(self, experts: str) -> set[int]:
        """Ids of the experts that `experts` (canonical, ends in `.experts`) has anything of."""
        found = set()
        for name in (*self.exl3, *self.native):
            if name.startswith(experts + "."):
                found.add(int(name[len(experts) + 1 :].split(".")[0]))
        return found


def read_layout(folder: Path) -> Layout:
    """Scan the headers of a checkpoint folder. Raises Exl3LoadError naming the file or tensor."""
    modules: dict[str, dict] = defaultdict(dict)
    disk_names: dict[str, str] = {}
    native = set()
    for disk_name, dtype, shape in _tensors(folder):
        name = canonical(disk_name)
        if name in disk_names:
            raise Exl3LoadError(f"{disk_name}: the checkpoint also has {disk_names[name]}, expected one of them")
        disk_names[name] = disk_name
        module, _, suffix = name.rpartition(".")
        if suffix in EXL3_SUFFIXES:
            modules[module][suffix] = (dtype, shape)
        else:
            native.add(name)
    layout = Layout(_exl3_shapes(modules, native), frozenset(native))
    _check_groups(layout)
    return layout


def _exl3_shapes(modules: dict[str, dict], native: set[str]) -> dict[str, TensorShape]:
    shapes = {}
    for module, tensors in modules.items():
        if f"{module}.weight" in native:
            raise Exl3LoadError(f"{module}: has both .weight and .{next(iter(tensors))}, expected one form")
        try:
            shapes[module] = shape_from_headers(module, tensors)
        except Exl3FormatError as error:
            raise Exl3LoadError(str(error)) from error
        if not _LOADABLE.fullmatch(module):
            raise Exl3LoadError(
                f"{module}.trellis: this plugin loads no EXL3 weight of that name; the checkpoint needs "
                f"{module}.weight there, or is of another model"
            )
    return shapes


def _check_groups(layout: Layout) -> None:
    """Matrices that vLLM puts into one layer come together or not at all: it would not notice a gap."""
    modules = {name.rpartition(".")[0] for name in layout.native if name.endswith(".weight")} | set(layout.exl3)
    for module in sorted(modules):
        parent, _, last = module.rpartition(".")
        for part in _companions(last, f"{parent}.{KDA_FUSED}" in modules):
            if f"{parent}.{part}" not in modules:
                raise Exl3LoadError(
                    f"{parent}.{part}: neither its .weight nor its .trellis is in the checkpoint, "
                    f"which has {module}; download the checkpoint again"
                )


def _companions(last: str, is_kda_fused: bool) -> tuple[str, ...]:
    kda = FUSED_PARTS["in_proj_qkvbfg_a"]
    if last in kda or last == KDA_FUSED:
        return (KDA_FUSED, *kda[3:]) if is_kda_fused else kda
    for parts in FUSED_PARTS.values():
        if last in parts:
            return (*parts, "down_proj") if last in ("gate_proj", "up_proj") else parts
    return FUSED_PARTS["gate_up_proj"] if last == "down_proj" else ()


# Headers


def _tensors(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor; checks that index, headers and file sizes agree."""
    shards = _shards(folder)
    seen: dict[str, str] = {}
    for shard, expected in sorted(shards.items()):
        header = read_header(folder / shard)
        for name in header:
            if name in seen:
                raise Exl3LoadError(f"{name}: is in both {seen[name]} and {shard}, expected once")
            seen[name] = shard
        if expected is not None and expected != set(header):
            odd = min(expected ^ set(header))
            place = "is in the index but not in the file" if odd in expected else "is in the file but not in the index"
            raise Exl3LoadError(f"{odd}: {place} ({folder / shard}); download this shard and the index again")
        for name, entry in header.items():
            yield name, entry["dtype"], tuple(entry["shape"])


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """Shard file name -> the tensors that the index puts there, None without an index."""
    index = folder / INDEX_NAME
    if not index.is_file():
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise Exl3LoadError(f"{folder}: has no {INDEX_NAME} and no *.safetensors file")
        return dict.fromkeys(files)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise Exl3LoadError(f"{index}: cannot be read as a safetensors index ({error!r}); download it again") from error
    shards: dict[str, set[str] | None] = defaultdict(set)
    for tensor, shard in weight_map.items():
        shards[shard].add(tensor)
    return shards


def read_header(path: Path) -> dict[str, dict]:
    """The tensor entries of a safetensors file. Raises Exl3LoadError if the file is missing or cut."""
    if not path.is_file():
        raise Exl3LoadError(f"{path}: the shard is missing; download the checkpoint again")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        raw = file.read(length) if length <= MAX_HEADER_BYTES else b""
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Exl3LoadError(f"{path}: is no whole safetensors file (no readable header); download it again") from error
    if 8 + length + end != size:
        last = max(header, key=lambda name: header[name]["data_offsets"][1])
        raise Exl3LoadError(
            f"{path}: has {size} bytes, its header describes {8 + length + end} (up to {last}); download it again"
        )
    return header


# Claims of config.json


def check_claims(layout: Layout, quantization: dict) -> None:
    """Compare `quantization_config` with the headers: scope, bits and codebook of the routed experts."""
    if not layout.exl3:
        raise Exl3LoadError("config.json says quant_method exl3, but no tensor of the checkpoint is EXL3")
    if quantization.get("scope") != ROUTED_EXPERTS_SCOPE:
        return
    dense = set((quantization.get("non_routed_exl3") or {}).get("layers", {}))
    dense = {part for name in dense for part in expand_fused(canonical(name))}
    for module, shape in layout.exl3.items():
        if _ROUTED_EXPERT.fullmatch(module):
            _check_expert_claim(module, shape, quantization)
        elif module not in dense:
            raise Exl3LoadError(
                f"{module}.trellis: is EXL3, but config.json's scope {ROUTED_EXPERTS_SCOPE} and its "
                f"non_routed_exl3 do not name it"
            )


def _check_expert_claim(module: str, shape: TensorShape, quantization: dict) -> None:
    for key, got in (("bits", shape.bits), ("codebook", shape.codebook.value)):
        want = quantization.get(key, got)
        if want != got:
            raise Exl3LoadError(f"{module}.trellis: is {shape}, but config.json says {key} {want}")


def expand_fused(module: str) -> tuple[str, ...]:
    """The checkpoint's modules behind one of vLLM's: `x.gate_up_proj` -> `x.gate_proj`, `x.up_proj`."""
    parent, _, last = module.rpartition(".")
    return tuple(f"{parent}.{part}" for part in FUSED_PARTS[last]) if last in FUSED_PARTS else (module,)
