"""A worker without a model: it keeps in each cache block which tokens its recurrent state has read, and compares.

Blocks come from vLLM's real scheduler, and where states are read, kept and copied from the real kernels of vLLM's
runner for prefix-cached states; they run here as plain Python, on arrays, one request after the other.
"""

import functools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
from schedulers import VOCAB, Run
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.request import Request
from vllm.v1.worker import mamba_utils

STATE_GROUP = 1  # in schedulers.cache_groups
BLOCKS = 1024  # columns of a block table


@dataclass(frozen=True)
class Pointer:
    values: np.ndarray
    offset: object = 0

    def __add__(self, more):
        return Pointer(self.values, self.offset + more)


def load(pointer, mask=True, other=0):
    return np.where(mask, pointer.values[np.where(mask, pointer.offset, 0)], other)


def store(pointer, value, mask=True):
    offset, value, mask = np.broadcast_arrays(pointer.offset, value, mask)
    pointer.values[offset[mask]] = value[mask]


# What the kernels below use of Triton. `program_id` is always 0: one request, one state, one tile.
LANGUAGE = SimpleNamespace(program_id=lambda axis: 0, arange=np.arange, load=load, store=store, maximum=np.maximum)
ONE_ROW = Pointer(np.zeros(1, int))


def run_kernel(name: str, copy, *arguments, **constants) -> None:
    """One of vLLM's kernels, with Triton's language and its copy of a block's bytes replaced by what is here."""
    function = getattr(mamba_utils, name)
    with mock.patch.multiple(mamba_utils, tl=LANGUAGE, _copy_mamba_state_block=copy):
        getattr(function, "fn", function)(*arguments, **constants)  # below Triton's decorator, where there is a GPU


@dataclass
class Held:
    """The state at the end of a step after its first token, its second, ... `window` is that of the convolution."""

    state: object = None
    window: list = field(default_factory=list)


@dataclass
class Row:
    tokens: list[int]
    prefill: int
    computed: int
    optimistic: int  # as the scheduler counts, with all drafts accepted
    columns: list[int]
    index: np.ndarray  # column of the running state
    accepted: np.ndarray


class Worker:
    """Executes what a scheduler gives out, in that order. `faults` are the reads that got another state."""

    def __init__(self, block: int, drafts: int, seed: int) -> None:
        self.block, self.drafts, self.random = block, drafts, random.Random(seed)
        self.rows: dict[str, Row] = {}
        self.blocks: dict[int, Held] = {}
        self.said: dict[str, list[int]] = {}
        self.faults: list[str] = []
        self.hits = self.copies = self.preempted = 0

    def execute(self, output) -> dict[str, list[int]]:
        """The tokens that each scheduled request gets in this step."""
        for name in {*output.finished_req_ids, *(output.preempted_req_ids or ())}:
            self.rows.pop(name, None)
        self.preempted += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            computed, tokens = new.num_computed_tokens, list(new.prefill_token_ids)
            self.hits += computed > 0
            self.rows[new.req_id] = Row(
                tokens, len(tokens), computed, computed, list(new.block_ids[STATE_GROUP]),
                np.array([(computed - 1) // self.block]), np.array([1]),
            )  # fmt: skip
        known = output.scheduled_cached_reqs
        for name, computed, more in zip(
            known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True
        ):
            self.rows[name].optimistic = computed
            self.rows[name].columns += more[STATE_GROUP] if more else ()
        drafted = output.scheduled_spec_decode_tokens
        return {
            name: self.run(name, self.rows[name], count, len(drafted.get(name, ())))
            for name, count in output.num_scheduled_tokens.items()
        }

    def run(self, name: str, row: Row, count: int, drafts: int) -> list[int]:
        self.before(row, count)
        begin, fresh = row.computed, count - drafts
        prefilling = min(row.optimistic, row.prefill) < row.prefill
        several = not prefilling or (fresh == 1 and row.optimistic > 0)
        if begin:
            self.check(name, row, row.accepted[0] - 1 if several else 0)
        sampled = []
        if begin + fresh == len(row.tokens):
            accepted = 1 + self.random.randint(0, drafts)
            for _ in range(accepted):
                sampled.append(hash(tuple(row.tokens[-9:])) % VOCAB)
                row.tokens.append(sampled[-1])
            self.said[name] = list(row.tokens)
        self.write(row, begin, count, max(len(sampled), 1), several)
        row.computed += fresh + max(len(sampled) - 1, 0)
        row.accepted[0] = max(len(sampled), 1)
        self.after(row)
        return sampled

    def before(self, row: Row, count: int) -> None:
        """What vLLM's runner does before a step: the running state goes to the block that the step ends in."""
        source, bias = np.zeros(1, int), np.zeros(1, int)
        run_kernel(
            "preprocess_mamba_align_fused_kernel", None,
            ONE_ROW, Pointer(row.index), Pointer(np.array([row.computed])), Pointer(np.array([0, count])),
            Pointer(row.accepted), Pointer(source), Pointer(bias), 1, BLOCK_SIZE=1, MAMBA_BLOCK_SIZE=self.block,
        )  # fmt: skip
        run_kernel(
            "precopy_mamba_align_fused_kernel", functools.partial(self.copy, row),
            Pointer(row.index), Pointer(source), Pointer(bias), *[None] * 10, ONE_ROW, 1,
            COPY_BLOCK_SIZE=1, CONV_STATE_DIM_FIRST=False,
        )  # fmt: skip

    def after(self, row: Row) -> None:
        """And after it: a state that drafts ran past is copied to the block that ends with it."""
        run_kernel(
            "postprocess_mamba_fused_kernel", functools.partial(self.copy, row),
            Pointer(row.accepted.copy()), Pointer(row.index), None, Pointer(np.array([row.computed])), *[None] * 11,
            Pointer(row.accepted), ONE_ROW, 1, block_size=self.block, COPY_BLOCK_SIZE=1, CONV_STATE_DIM_FIRST=False,
            HAS_IDX_MAPPING=True, PRECOMPUTED_NEW_COMPUTED=True,
        )  # fmt: skip

    def copy(self, row: Row, _state, _row, source, target, bias, *_layout) -> None:
        self.copies += 1
        window, state = self.held(row, source).window[bias:], self.held(row, source + bias).state
        to = self.held(row, target)
        to.state, to.window = state, window

    def held(self, row: Row, column) -> Held:
        return self.blocks.setdefault(row.columns[int(column)], Held())

    def check(self, name: str, row: Row, bias: int) -> None:
        want = tuple(row.tokens[: row.computed])
        state, window = self.held(row, row.index[0] + bias).state, self.held(row, row.index[0]).window
        for kind, seen in (("state", state), ("window", window[bias] if bias < len(window) else None)):
            if seen != want:
                self.faults.append(f"{name} at {row.computed}: {kind} of {'nothing' if seen is None else len(seen)}")

    def write(self, row: Row, begin: int, count: int, right: int, several: bool) -> None:
        """One state for a chunk; for a decoding request one after each token, those after a wrong draft useless."""
        ends = range(begin + 1, begin + 1 + count) if several else [begin + count]
        states = [tuple(row.tokens[:end]) if at < right else None for at, end in enumerate(ends)]
        for at, state in enumerate(states):
            self.held(row, row.index[0] + at).state = state
        self.held(row, row.index[0]).window = states


@dataclass
class Worked(Run):
    """A scheduler with this worker: each step runs when it is scheduled, its answer comes with `answer`."""

    meanwhile = staticmethod(lambda: None)  # called while the model runs, before its answer is seen

    def __post_init__(self) -> None:
        self.worker = Worker(self.case.block, self.case.drafts, self.random.random())
        self.sampled = {}

    def step(self):
        output = super().step()
        self.sampled[id(output)] = self.worker.execute(output)
        return output

    def tokens(self, output, reading: set[str]) -> list[list[int]]:
        self.meanwhile()
        return list(self.sampled.pop(id(output)).values())

    def unfilled(self) -> list[int]:
        """Blocks of states that the prefix cache would give out, but that do not hold the state that they stand for."""
        return [
            block.block_id
            for block in self.scheduler.kv_cache_manager.block_pool.blocks
            if block.block_hash is not None and get_group_id(block.block_hash) == STATE_GROUP
            and self.hash_of(self.worker.blocks.get(block.block_id)) != get_block_hash(block.block_hash)
        ]  # fmt: skip

    def hash_of(self, held: Held | None):
        if held is None or not held.state:
            return None
        tokens = list(held.state)
        made = Request("hashed", tokens, SamplingParams(), None, block_hasher=self.hasher).block_hashes
        return made[-1] if made else None
