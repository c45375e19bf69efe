"""What a checkpoint holds, from its headers alone: rates, codebooks, EXL3 layers, and the bytes that each rank gets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import NamedTuple

from launcher.weights import headers, record
from launcher.weights.headers import Tensor
from launcher.weights.record import Verified

NAME = ".exl3-contents.json"
FORMAT = 1

BLOCK = 128  # columns that EXL3 transforms together; a slice ends on whole blocks
VOCABULARY_BLOCK = 64  # vLLM's padding
SAMPLED_LAYERS_EXPERTS = (0, -1)  # of each layer the first and the last expert: a shared suh is the converter's choice

MAIN, MTP, VISION = "main", "mtp", "vision"
EXPERT_PART = re.compile(r"layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.(\w+)")
# Native tensors that vLLM splits over the ranks, by what is kept together; everything else is whole on every rank.
BY_HEADS = re.compile(r"self_attn\.((q|k|v|qkv|b|f_b|g_b|q_b|kv_b|o)_proj|[qkv]_conv1d|A_log|dt_bias)")
BY_BLOCKS = re.compile(r"mlp\.(shared_experts\.)?(gate|up|down)_proj")
BY_VOCABULARY = re.compile(r"(embed_tokens|lm_head)\b")
IN_VISION = re.compile(r"visual\..*(qkv|proj)\b")


class Share(NamedTuple):
    """How a tensor is spread: in `units` that stay whole (1: not at all); `experts`: or by whole experts of so many."""

    part: str
    units: int
    experts: int = 0

    def of_rank(self, ranks: int, *, expert_parallel: bool) -> float:
        """The largest rank's part, from 0 to 1."""
        if self.experts and expert_parallel:
            return ceil(self.experts / ranks) / self.experts
        return ceil(self.units / ranks) / self.units


@dataclass(frozen=True)
class Contents:
    """`rates`, `codebooks`: how many EXL3 matrices; `layers`: with EXL3 experts; `dense`: EXL3 matrices beside them;
    `shared_suh`: whether gate and up of the `sampled` experts have the same suh, None where there are no experts."""

    rates: Mapping[float, int]
    codebooks: Mapping[str, int]
    layers: tuple[int, ...]
    dense: int
    bytes: Mapping[Share, int]
    shared_suh: bool | None
    sampled: int

    def bytes_of_rank(self, ranks: int, *, expert_parallel: bool, mtp: bool, vision: bool) -> int:
        """Of the weights on the fullest rank. `mtp`: with the draft layer; `vision`: with the image tower."""
        parts = {MAIN, *([MTP] if mtp else []), *([VISION] if vision else [])}
        return round(sum(size * share.of_rank(ranks, expert_parallel=expert_parallel)
                         for share, size in self.bytes.items() if share.part in parts))  # fmt: skip

    def describe(self) -> str:
        """One line."""
        rates = ", ".join(f"{count} EXL3 matrices at {bits:g} bits" for bits, count in sorted(self.rates.items()))
        sharing = {True: f"gate and up share suh ({self.sampled} experts sampled)", False: "gate and up differ in suh",
                   None: "no experts"}[self.shared_suh]  # fmt: skip
        layers = f"experts of layers {spans(self.layers)}" if self.layers else "no EXL3 experts"
        return f"{rates} ({', '.join(sorted(self.codebooks))}), {layers}, {self.dense} beside them; {sharing}"


def spans(numbers: tuple[int, ...]) -> str:
    """3-44, 46."""
    parts, start = [], None
    for i, number in enumerate(numbers):
        start = number if start is None else start
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            parts.append(str(start) if start == number else f"{start}-{number}")
            start = None
    return ", ".join(parts)


def read(folder: Path, kind: str = "model") -> Contents:
    """The header pass. Raises LauncherError naming the shard or tensor, what it should be and what to do."""
    config = headers.read_config(folder / "config.json")
    sizes: Counter[Share] = Counter()
    suhs: dict[str, Tensor] = {}
    spreading = Spreading(config)

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in headers.tensors(folder):
            short = headers.canonical(name)
            sizes[spreading.share_of(short)] += tensor.bytes
            if short.endswith(("gate_proj.suh", "up_proj.suh")) and EXPERT_PART.fullmatch(short):
                suhs[short] = tensor
            yield name, tensor

    modules = headers.exl3_modules(counted())
    if kind == "model":
        headers.check_claims(folder, config, modules)
        headers.check_experts(folder, config, modules)
    experts = [module for module in modules if headers.EXPERT.fullmatch(module)]
    shared, sampled = compare_suh(folder, suhs)
    return Contents(
        rates=dict(Counter(weight.bits for weight in modules.values())),
        codebooks=dict(Counter(weight.codebook for weight in modules.values())),
        layers=tuple(sorted({layer_of(module) for module in experts})),
        dense=len(modules) - len(experts),
        bytes=dict(sizes),
        shared_suh=shared,
        sampled=sampled,
    )


# Kept beside the record, so that a start need not read the headers of what is verified and unchanged


def keep(folder: Path, found: Contents, verified: Verified) -> None:
    """Only a shortcut: where it cannot be written, the headers are read again."""
    raw = asdict(found) | {
        "rates": sorted(found.rates.items()),
        "bytes": [[*share, size] for share, size in sorted(found.bytes.items())],
    }
    text = json.dumps({"format": FORMAT, "of": digest(verified), "contents": raw})
    with contextlib.suppress(OSError):
        (folder / NAME).write_text(text + "\n", encoding="utf-8")


def of(folder: Path, kind: str = "model") -> Contents:
    """Of a folder that is verified and unchanged, as kept; else from its headers, as `read`."""
    verified = record.read(folder)
    if verified and not record.changed(folder, verified):
        try:
            raw = json.loads((folder / NAME).read_bytes())
            if (raw["format"], raw["of"]) == (FORMAT, digest(verified)):
                return from_json(raw["contents"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not kept, or not whole
    return read(folder, kind)


def from_json(raw: Mapping) -> Contents:
    shares = {Share(*words): size for *words, size in raw["bytes"]}
    return Contents(**{**raw, "rates": dict(raw["rates"]), "layers": tuple(raw["layers"]), "bytes": shares})


def digest(verified: Verified) -> str:
    return hashlib.sha256(json.dumps(verified.manifest.to_json(), sort_keys=True).encode()).hexdigest()


# Rules


def layer_of(name: str) -> int:
    return int(re.match(r"layers\.(\d+)\.", name)[1])


class Spreading:
    """vLLM's rules for GLM-5.3-Flash, as its model files state them."""

    def __init__(self, config: Mapping):
        text = headers.text_config(config)
        self.layers = text.get("num_hidden_layers") or 1 << 30
        self.experts = text.get("n_routed_experts") or 1
        self.expert_blocks = max(1, (text.get("moe_intermediate_size") or BLOCK) // BLOCK)
        self.shared_blocks = self.expert_blocks * (text.get("n_shared_experts") or 1)
        self.dense_blocks = max(1, (text.get("intermediate_size") or BLOCK) // BLOCK)
        self.heads = text.get("num_attention_heads") or 1
        self.vocabulary = max(1, ceil((text.get("vocab_size") or 1) / VOCABULARY_BLOCK))
        self.vision_heads = (config.get("vision_config") or {}).get("num_heads") or 1

    def share_of(self, name: str) -> Share:
        """Of a tensor by its canonical name."""
        if name.startswith("visual."):
            return Share(VISION, self.vision_heads if IN_VISION.match(name) else 1)
        number = re.match(r"layers\.(\d+)\.", name)
        part = MTP if number and int(number[1]) >= self.layers else MAIN
        if found := EXPERT_PART.fullmatch(name):
            whole = ("svh",) if found[1] == "down" else ("suh",)
            is_whole = found[2] in (*whole, *headers.MARKERS)
            return Share(part, 1 if is_whole else self.expert_blocks, self.experts)
        if BY_HEADS.search(name):
            return Share(part, self.heads)
        if found := BY_BLOCKS.search(name):
            return Share(part, self.shared_blocks if found[1] else self.dense_blocks)
        return Share(part, self.vocabulary if BY_VOCABULARY.search(name) else 1)


def compare_suh(folder: Path, suhs: Mapping[str, Tensor]) -> tuple[bool | None, int]:
    """(whether gate and up have the same suh wherever it was looked at, how many experts that were)."""
    by_layer: dict[int, set[int]] = {}
    for name in suhs:
        found = headers.EXPERT.match(name)
        by_layer.setdefault(layer_of(name), set()).add(int(found[2]))
    pairs = [(layer, sorted(experts)[i]) for layer, experts in by_layer.items() for i in SAMPLED_LAYERS_EXPERTS]
    pairs = sorted(set(pairs))
    for layer, expert in pairs:
        stem = f"layers.{layer}.mlp.experts.{expert}."
        if content(folder, suhs.get(f"{stem}gate_proj.suh")) != content(folder, suhs.get(f"{stem}up_proj.suh")):
            return False, len(pairs)
    return (True if pairs else None), len(pairs)


def content(folder: Path, tensor: Tensor | None) -> bytes | None:
    if tensor is None:
        return None
    with (folder / tensor.shard).open("rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.bytes)
