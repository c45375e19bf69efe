"""Copies what an engine of this process remembers of a request at a length: KDA states, latents, the indexer's keys.

It reaches into vLLM 0.33.0 by name, on a CPU into 0.32.0, and says what is missing where a name is gone. Copies are
made when the scheduler is about to plan a step: all that was planned before has been given to the GPU, which is waited
for, and nothing else has. So it makes no difference whether the scheduler runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

RECURRENT, CONV, LATENT, POOLS, TAIL = "KDA recurrent", "KDA conv", "latent", "indexer pools", "indexer tail"
FP8, GROUP, SCALE_BYTES = torch.float8_e4m3fn, 128, 4  # values of an fp8 row share one fp32 scale by 128

State = dict[str, dict[str, torch.Tensor]]  # layer -> kind -> one tensor, or rows [tokens or pools, values]


class Unreadable(RuntimeError):
    """This engine's caches are not where, or not what, they were when this file was written."""


@dataclass(frozen=True)
class Place:
    """Where a layer keeps a request that an engine has read up to a length."""

    spec: object  # of the layer's cache
    blocks: list[int]  # of the request, in the layer's group
    num_blocks: int  # of the engine
    length: int  # tokens that count
    planned: int  # the same and the drafts behind them


def recurrent_and_conv(layer, place: Place) -> dict[str, torch.Tensor]:
    """The state that counts is the first of a step's last block, whether drafts came behind or not.

    With drafts a state has more room in its convolution; what counts is in front.
    """
    conv, recurrent = layer.kv_cache
    mode = place.spec.mamba_cache_mode
    if mode not in ("align", "none"):
        raise Unreadable(f"KDA states are kept in mode {mode!r}; only 'align' and 'none' are known.")
    column = (place.planned - 1) // place.spec.block_size if mode == "align" else 0
    if column >= len(place.blocks) or place.blocks[column] == 0:
        raise Unreadable(f"a request of {place.length} tokens has no KDA state in column {column} of {place.blocks}.")
    window = conv[place.blocks[column]]  # [inputs, channels], or the other way round
    window = window if window.shape[0] < window.shape[1] else window.T
    return {RECURRENT: recurrent[place.blocks[column]], CONV: window[: layer.conv_size - 1]}


def latents(layer, place: Place) -> dict[str, torch.Tensor]:
    """One row per token, as the attention reads it."""
    rows = pages(layer.kv_cache, place, place.spec.block_size).flatten(0, 1)[: place.length]
    width = layer.kv_lora_rank
    if rows.dtype in (torch.bfloat16, torch.float32):
        return {LATENT: rows[:, :width]}
    least = width + width // GROUP * SCALE_BYTES
    if rows.element_size() != 1 or rows.shape[1] < least:
        raise Unreadable(f"latents are rows of {rows.shape[1]} {rows.dtype}; known are bf16 and {least} bytes or more.")
    scales = rows[:, width:least].contiguous().view(torch.float32)
    values = rows[:, :width].contiguous().view(FP8).float().unflatten(1, (-1, GROUP))
    return {LATENT: (values * scales.unsqueeze(2)).flatten(1)}


def pooled_keys(layer, place: Place) -> dict[str, torch.Tensor]:
    """One row per whole pool. A page holds all its values, then all its scales."""
    cache, pool = layer.kv_cache, place.spec.tokens_per_state
    states, width = cache.shape[1], cache.shape[2]
    if cache.dtype != torch.uint8 or width != GROUP + SCALE_BYTES or cache.stride(1) != width:
        raise Unreadable(f"pooled keys are {tuple(cache.shape)} {cache.dtype} with strides {cache.stride()}; known are "
                         f"bytes [pages, pools, {GROUP + SCALE_BYTES}].")  # fmt: skip
    found = pages(cache, place, place.spec.block_size // pool).flatten(1)
    values = found[:, : states * GROUP].contiguous().view(FP8).float().unflatten(1, (states, GROUP))
    scales = found[:, states * GROUP :].contiguous().view(torch.float32)
    return {POOLS: (values * scales.unsqueeze(2)).flatten(0, 1)[: place.length // pool]}


def tail(layer, place: Place) -> dict[str, torch.Tensor]:
    """One row (key, then gate) per token of the pool that is not whole yet. Nothing where all pools are."""
    cache, pool = layer.kv_cache, layer._index_kpool
    if cache.dim() != 4 or cache.shape[:2] != (place.num_blocks, 2):
        raise Unreadable(f"the indexer's tail is {tuple(cache.shape)}; known is [{place.num_blocks}, 2, ring, values].")
    positions = torch.arange(place.length - place.length % pool, place.length, device=cache.device)
    rows = cache[place.blocks[0]][:, positions % cache.shape[2]]
    return {TAIL: rows.transpose(0, 1).flatten(1)} if len(positions) else {}


# Class of a layer -> how its cache is read. Others, such as those of a DFlash2 draft, are left out.
READERS: dict[str, Callable] = {
    "Glm5NextLinearAttention": recurrent_and_conv, "MLAAttention": latents,
    "Glm5NextIndexerCache": pooled_keys, "Glm5NextTailCache": tail,
}  # fmt: skip
CPU_READERS = ("Glm5NextLinearAttention", "MLAAttention")  # whose attention is dense


def pages(cache: torch.Tensor, place: Place, states: int) -> torch.Tensor:
    """The request's pages [pages, states of one, ...]. Blocks of `states` states may be several pages each, and other
    layers' pages may lie between blocks."""
    parts, rest = divmod(states, cache.shape[1])
    apart, more = divmod(cache.shape[0] - parts, max(1, place.num_blocks - 1))
    if rest or more or apart < parts:
        raise Unreadable(f"a cache of {tuple(cache.shape)} does not hold {place.num_blocks} blocks of {states} states.")
    needed = place.blocks[: -(-place.length // place.spec.block_size)]
    if len(needed) * place.spec.block_size < place.length or 0 in needed:
        raise Unreadable(f"a request of {place.length} tokens has the blocks {needed} of {place.spec.block_size}.")
    numbers = [block * apart + part for block in needed for part in range(parts)]
    return cache[torch.tensor(numbers, device=cache.device)]


def spec_of(spec, layer: str):
    """A group's specification, or what it says of the layer where its layers differ."""
    return getattr(spec, "kv_cache_specs", {layer: spec})[layer]


class Recorder:
    """While it is entered, the states of requests are copied when they have the lengths that are wanted.

    `wanted`: (what the request's id begins with, up to a dash; length). `found` has the states on the CPU.
    """

    def __init__(self, llm, wanted: set[tuple[str, int]]) -> None:
        self.wanted, self.found, self.due = wanted, {}, []
        try:
            self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
            (worker,) = llm.collective_rpc(lambda worker: worker)
            # The scheduler's own config has one specification for all layers of a group, the worker's has each.
            config, layers = worker.model_runner.kv_cache_config, worker.vllm_config.compilation_config
            layers, self.num_blocks, groups = layers.static_forward_context, config.num_blocks, config.kv_cache_groups
        except AttributeError as error:
            raise Unreadable(f"vLLM's engine is built otherwise now ({error}), or not in this process.") from error
        if len(groups) != len(self.managers):
            raise Unreadable(f"the worker has {len(groups)} groups of caches, the scheduler {len(self.managers)}.")
        self.layers = {
            name: (layers[name], READERS[type(layers[name]).__name__], number, spec_of(group.kv_cache_spec, name))
            for number, group in enumerate(groups)
            for name in group.layer_names
            if name in layers and type(layers[name]).__name__ in READERS
        }
        missing = set(READERS if torch.accelerator.is_available() else CPU_READERS)
        missing -= {type(layer).__name__ for layer, *_ in self.layers.values()}
        if missing:
            raise Unreadable(f"vLLM's engine has no layer of class {', '.join(sorted(missing))} any more.")

    def __enter__(self) -> Recorder:
        original = self.scheduler.schedule

        def schedule(*args, **kwargs):
            self.read()
            output = original(*args, **kwargs)
            self._note(output)
            return output

        self.scheduler.schedule = schedule  # of this one scheduler, in front of its class's
        return self

    def __exit__(self, failed, *_) -> None:
        del self.scheduler.schedule
        if failed is None:
            self.read()

    def _note(self, output) -> None:
        """Which of the requests in this step end at a length that is wanted, and where they lie."""
        for name in output.num_scheduled_tokens:
            planned = self.scheduler.requests[name].num_computed_tokens
            key = (name.split("-")[0], planned - len(output.scheduled_spec_decode_tokens.get(name, ())))
            if key in self.wanted and key not in self.found:
                blocks = [[block.block_id for block in manager.req_to_blocks[name]] for manager in self.managers]
                self.due.append((key, planned, blocks))

    def read(self) -> None:
        """Copy what the last step left."""
        if self.due and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        for key, planned, blocks in self.due:
            self.found[key] = {
                name: {kind: value.to("cpu", copy=True) for kind, value in reader(
                    layer, Place(spec, blocks[number], self.num_blocks, key[1], planned)).items()}
                for name, (layer, reader, number, spec) in self.layers.items()
            }  # fmt: skip
        self.due.clear()
