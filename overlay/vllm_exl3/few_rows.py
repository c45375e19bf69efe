"""Few rows on a GPU through exllamav3's kernels: routed experts and dense layers. No vLLM import at module level.

exllamav3's extension has traps that this module alone knows, so that its callers need not:
- its kernels share one lock buffer per device and wait for each other by spinning: they may run on one stream only;
- `exl3_moe` leaves out, without a word, every expert with more rows than its scratch holds;
- `exl3_gemm` times kernels at first use unless a shape is forced, and returns 0 where it has no kernel;
- for MUL1 it rounds activations to int8 unless the environment says otherwise.
"""

import functools
import importlib
import os
import re
from dataclasses import dataclass

import torch

from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.format import HADAMARD_BLOCK, TILE, Codebook
from vllm_exl3.ops import CODEBOOK_NUMBER, PackedExperts

EXTENSION = "exllamav3_ext"
NEEDED = (
    "exl3_moe exl3_moe_gather exl3_moe_max_concurrency exl3_moe_coop exl3_gemm exl3_gemv "
    "exl3_gemm_shape_compat g_get_num_sms reconstruct_had_slice hgemm"
).split()
EXL3_MOE_ARGUMENTS = 35  # of 1.6.5; 29 in 0.0.43
GET_EXTENSION = "install exllamav3 1.6.5 with its extension compiled ahead (docs/kernel.md)"

COOP_SLOTS = 256  # tokens * top-k that exl3_moe_coop takes in one call
GEMV_ROWS = 8
GEMM_ROWS = 144  # above, decoding the weights once and cuBLAS win
# Rows that a tile of exl3_gemm's shape holds, tallest first. Up to 16 rows the extension's own rule picks the shape.
TALL_SHAPES = ((7, 64), (6, 48), (5, 32))
DENSE_SCRATCH_BYTES = 64 * 2**20

STREAM_SWITCH = "VLLM_DISABLE_SHARED_EXPERTS_STREAM"


def keep_one_stream() -> None:
    """Have vLLM run shared experts on the main stream: for `register()`, before any layer is built.

    vLLM reads the variable whenever a layer with shared experts is built. A user's own value stays, and
    `require_one_stream` refuses it if it is the wrong one.
    """
    os.environ.setdefault(STREAM_SWITCH, "1")


def require_one_stream(where: str, micro_batches: int = 1) -> None:
    """Raise Exl3LoadError, naming `where`, if vLLM would run EXL3 layers on two streams at once.

    For `create_weights`, where vLLM reads the variable too. `micro_batches` is vLLM's `parallel_config.num_ubatches`.
    """
    import vllm.envs

    if not getattr(vllm.envs, STREAM_SWITCH):
        raise Exl3LoadError(
            f"{where}: {STREAM_SWITCH} is 0, so that shared experts would run beside routed ones; exllamav3's kernels "
            f"would then wait for each other for ever. Set it to 1 or leave it unset"
        )
    if micro_batches > 1:
        raise Exl3LoadError(
            f"{where}: {micro_batches} micro-batches run on two streams, and exllamav3's kernels must not; "
            f"start without --enable-dbo and --ubatch-size"
        )


@functools.cache
def extension():
    """exllamav3's extension module, checked and with its int8 GEMV off.

    Raises Exl3LoadError if it is missing or has not the functions of 1.6.5. Nothing is compiled here.
    """
    os.environ["EXL3_INT8_GEMV"] = "0"  # the extension reads it at its first GEMM, and never again
    try:
        module = importlib.import_module(EXTENSION)
    except ImportError as error:
        raise Exl3LoadError(f"{EXTENSION}: {error}; {GET_EXTENSION}") from error
    check_extension(module)
    return module


def check_extension(module) -> None:
    """Raise Exl3LoadError naming what `module` lacks of exllamav3 1.6.5's interface."""
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise Exl3LoadError(f"{module.__name__}: lacks {', '.join(missing)}; {GET_EXTENSION}")
    arguments = len(set(re.findall(r"\barg\d+\b", module.exl3_moe.__doc__ or "")))
    if arguments != EXL3_MOE_ARGUMENTS:
        raise Exl3LoadError(
            f"{module.__name__}: exl3_moe takes {arguments} arguments, 1.6.5's takes {EXL3_MOE_ARGUMENTS}; "
            f"{GET_EXTENSION}"
        )


def require_instance(module, function: str, bits: float, codebook: Codebook) -> None:
    """Raise Exl3LoadError if `module` is a trimmed build without `function` ("moe", "coop", "gemm") at this rate."""
    built = getattr(module, "INSTANCES", None)
    name = f"{function}:{bits:g}:{CODEBOOK_NUMBER[codebook]}"
    if built is not None and name not in built.split():
        raise Exl3LoadError(
            f"{module.__name__}: this trimmed build has no {function} kernel for {bits:g} bits and {codebook.value} "
            f"(it has: {built}); build it with that instance or install exllamav3 1.6.5 whole"
        )


def bits_of(trellis: torch.Tensor) -> float:
    """Bits per weight of a packed tensor [..., 16*K]."""
    return trellis.shape[-1] / TILE


def codebook_flags(codebook: Codebook) -> tuple[bool, bool]:
    """exllamav3's pair (mcg, mul1)."""
    return codebook is Codebook.MCG, codebook is Codebook.MUL1


# --- routing tables -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """What `exl3_moe` and `exl3_moe_gather` want to know of a routing: S = tokens * top-k slots, E experts."""

    expert_of_slot: torch.Tensor  # int64 [S], E for slots of nobody here
    count: torch.Tensor  # int64 [E + 1], the last for those slots
    start: torch.Tensor  # int64 [E + 1], where an expert's rows start in the sorted order
    token: torch.Tensor  # int64 [S], sorted by expert
    weight: torch.Tensor  # fp16 [S], sorted by expert
    place: torch.Tensor  # int64 [S], of a slot in the sorted order
    scratch_row: torch.Tensor  # int64 [E], the first row of an expert in the fused kernel's output
    fused: torch.Tensor  # int64 [E], 1 if the expert has at most `cap` rows


def merge_repeats(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave each expert once in a token's choice, with the sum of its weights; -1 in the other places.

    ids [T, k] integer, weights [T, k] fp32. Afterwards no expert has more rows than there are tokens, which a
    router's garbage on padding rows does not promise.
    """
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    merged = (same * weights.unsqueeze(1)).sum(2)
    return ids.masked_fill(same.tril(-1).any(2), -1), merged


def routing_tables(ids: torch.Tensor, weights: torch.Tensor, experts: int, cap: int, ramp: torch.Tensor) -> Tables:
    """The tables of local ids [T, k] (negative or too large: not here) and fp32 weights [T, k], on the ids' device.

    `ramp` is int64 [>= max(T * k, experts + 2)]: 0, 1, 2, ... Rows of an expert are in the order of their tokens, so
    that equal inputs give equal bits. No host sync.
    """
    flat = ids.clamp(-1, experts).remainder(experts + 1).flatten()
    ordered, order = torch.sort(flat.to(torch.int16), stable=True)
    bounds = torch.searchsorted(ordered, ramp[: experts + 2].to(torch.int16))
    count, start = bounds[1:] - bounds[:-1], bounds[:-1]
    fused = count[:experts] <= cap
    fused_rows = count[:experts] * fused
    return Tables(
        expert_of_slot=flat.to(torch.int64),
        count=count,
        start=start,
        token=torch.div(order, ids.shape[1], rounding_mode="floor"),
        weight=weights.flatten().to(torch.float16)[order],
        place=torch.empty_like(order).scatter_(0, order, ramp[: order.shape[0]]),
        scratch_row=fused_rows.cumsum(0) - fused_rows,
        fused=fused.to(torch.int64),
    )


def scratch_rows(tokens: int, top_k: int, experts: int, cap: int) -> int:
    """Rows that the fused kernel's output needs at most when experts with more than `cap` rows are not its own."""
    return min(tokens * top_k, experts * cap)


# --- routed experts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Geometry:
    """Everything that layers must have in common to share scratch."""

    device: torch.device
    experts: int  # local ones
    hidden: int
    width: int
    top_k: int
    cap: int  # rows of one expert that belong to these kernels
    partition_tokens: int  # tokens of the longest step that is split with the grouped kernel; 0 for none

    @property
    def needs_fused(self) -> bool:
        """Whether there are steps that exl3_moe_coop cannot take."""
        return self.cap * self.top_k > COOP_SLOTS or self.partition_tokens > 0


class Scratch:
    """The kernels' scratch of one geometry; `nbytes` is what it costs. `groups` experts are worked on at a time."""

    def __init__(self, g: Geometry, groups: int) -> None:
        half, single = torch.float16, torch.float32
        make = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=g.device)
        # exl3_moe: rotated inputs, gate and up, and a row of output for each slot.
        groups = groups if g.needs_fused else 0
        tokens = max(g.cap, g.partition_tokens) if g.needs_fused else 0
        self.states = [make(half, groups, g.cap, g.hidden) for _ in range(2)]
        self.middles = [make(half, groups, g.cap, g.width) for _ in range(2)]
        self.rows = make(single, scratch_rows(tokens, g.top_k, g.experts, g.cap), g.hidden)
        self.ramp = torch.arange(max(tokens * g.top_k, g.experts + 2), device=g.device)
        # exl3_moe_coop: rotated inputs, gate and up, activation, down, counters. The counters must start at zero;
        # the kernels put them back.
        slots = COOP_SLOTS
        self.rotated = [make(half, slots, g.hidden) for _ in range(2)]
        self.products = [make(single, slots, g.width) for _ in range(2)]
        self.activation = make(half, slots, g.width)
        self.down = make(single, slots, g.hidden)
        blocks = (g.width + g.hidden) // HADAMARD_BLOCK
        self.counters = torch.zeros(slots * (blocks + 2) + 3, dtype=torch.int32, device=g.device)

    @property
    def coop(self) -> list[torch.Tensor]:
        """In the order of exl3_moe_coop's arguments."""
        return [*self.rotated, *self.products, self.activation, self.down, self.counters]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in [*self.states, *self.middles, self.rows, self.ramp, *self.coop])


@functools.cache
def shared_scratch(geometry: Geometry) -> Scratch:
    """The one scratch of all layers of this geometry; made at the first call."""
    device = geometry.device
    return Scratch(geometry, extension().exl3_moe_max_concurrency(device.index))


def pointers(stack: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the addresses of stack[0], stack[1], ..., on the stack's device."""
    first, step = stack.data_ptr(), stack.stride(0) * stack.element_size()
    return torch.arange(stack.shape[0], device=stack.device, dtype=torch.int64) * step + first


class FusedExperts:
    """The routed experts of one layer, through `exl3_moe_coop` and `exl3_moe`.

    `experts` are CUDA tensors that must not move: their addresses are taken once. `limit` is SwiGLU's clamp, or None.
    `cap` is the largest number of rows of one expert that is taken here, `partition_tokens` the longest step for
    `run_partition`; they decide the scratch, which all layers of equal sizes share.

    Raises Exl3LoadError if the extension is missing, or has no kernel for these tensors.
    """

    def __init__(
        self, experts: PackedExperts, *, limit: float | None, top_k: int, cap: int, partition_tokens: int = 0
    ) -> None:
        self.ext = extension()
        self.experts = experts
        w13, w2 = (
            [getattr(experts, f"{stack}_{name}") for name in ("trellis", "suh", "svh")] for stack in ("w13", "w2")
        )
        self.bits = [bits_of(trellis) for trellis in (w13[0], w13[0], w2[0])]
        self.flags = codebook_flags(experts.codebook)
        self.limit = 0.0 if limit is None else float(limit)
        sizes = experts.count, experts.hidden, experts.width
        self.geometry = Geometry(w13[0].device, *sizes, top_k, cap, partition_tokens)
        self._require_kernels(experts.codebook)
        self.scratch = shared_scratch(self.geometry)
        self.tables = [pointers(t[:, side]) for side in (0, 1) for t in w13] + [pointers(t) for t in w2]

    def _require_kernels(self, codebook: Codebook) -> None:
        for bits in self.bits:
            require_instance(self.ext, "coop", bits, codebook)
        if not self.geometry.needs_fused:
            return
        if codebook is Codebook.THREE_INST:
            raise Exl3LoadError(
                f"exl3_moe has no kernel for the codebook 3inst; use a cap of {COOP_SLOTS // self.geometry.top_k} rows "
                f"or fewer, and no partition"
            )
        if self.geometry.experts >= 2**15:
            raise Exl3LoadError(f"{self.geometry.experts} experts: exl3_moe's tables are made for fewer than {2**15}")
        require_instance(self.ext, "moe", self.bits[0] if len(set(self.bits)) == 1 else 0, codebook)

    def run(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """Write the local experts' weighted sum of at most `cap` tokens into `out`; every element is written.

        x fp16 [T, H], topk_ids int32 or int64 [T, k] of local experts (negative: not here), topk_weights fp32 [T, k],
        out fp32 [T, H], all contiguous. Reads sizes on the host only, so it can be captured in a CUDA graph and
        replayed with other routing once it has run. Equal inputs give equal bits.
        Raises ValueError for more than `cap` tokens.
        """
        tokens, top_k = topk_ids.shape
        if tokens * top_k <= COOP_SLOTS:
            self.run_coop(x, topk_ids, topk_weights, out)
        elif tokens <= self.geometry.cap:
            self.run_fused(x, *merge_repeats(topk_ids, topk_weights), out)
        else:
            raise ValueError(
                f"{tokens} tokens are more than the {self.geometry.cap} rows that exl3_moe's scratch holds"
            )

    def run_partition(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """As `run`, of any number of tokens up to `partition_tokens`, but only for experts with 1 .. `cap` rows.

        The other experts are another kernel's, with `cap + 1` as its smallest number of rows; rows count slots, so
        an expert that a token names twice has two. `out` is that kernel's addend.
        """
        limit = self.geometry.partition_tokens
        if topk_ids.shape[0] > limit:
            raise ValueError(f"{topk_ids.shape[0]} tokens are more than the {limit} that scratch was made for")
        self.run_fused(x, topk_ids, topk_weights, out)

    def run_coop(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """`run` through exl3_moe_coop: tokens * top-k <= COOP_SLOTS. Any number of rows per expert."""
        g = self.geometry
        silu, gated, no_biases, no_shared = 0, True, (None, None, None), (None, None)
        self.ext.exl3_moe_coop(
            x,
            topk_ids.to(torch.int64),
            topk_weights.to(torch.float16),
            *(0, g.experts, g.hidden),
            *self.tables,
            *no_biases,
            *self.bits,
            *self.flags,
            *(silu, self.limit, gated),
            *self.scratch.coop,
            out,
            *no_shared,
        )

    def run_fused(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """The part of experts with at most `cap` rows through exl3_moe; zeros where a token has none of them."""
        g, s = self.geometry, self.scratch
        t = routing_tables(topk_ids, topk_weights, g.experts, g.cap, s.ramp)
        silu, fewest_rows, tile_rows = 0, 1, 16
        # The number of experts with rows is not known here; this bound only shapes the launch.
        active = min(g.experts, topk_ids.numel())
        out.zero_()
        self.ext.exl3_moe(
            *(x, out, t.count, t.token, t.weight),
            *s.states,
            *s.middles,
            silu,
            *self.bits,
            *self.tables,
            *(self.flags * 3),
            *(self.limit, active, s.rows, t.scratch_row),
            *(fewest_rows, g.cap, tile_rows),
        )
        self.ext.exl3_moe_gather(out, s.rows, t.expert_of_slot, t.place, t.start, t.scratch_row, t.fused, t.weight)


# --- dense layers ---------------------------------------------------------------------------------------------------


@functools.cache
def dense_scratch(device: torch.device) -> torch.Tensor:
    """The one scratch of all dense layers of a device: uint8 [DENSE_SCRATCH_BYTES]."""
    return torch.empty(DENSE_SCRATCH_BYTES, dtype=torch.uint8, device=device)


def slice_columns(rows: int, in_features: int, out_features: int) -> int:
    """How many columns of a weight fit in dense_scratch as fp16, beside their fp32 product with `rows` rows.

    A multiple of 128. Raises ValueError if not even 128 do.
    """
    block = HADAMARD_BLOCK * (2 * in_features + 4 * rows)
    if block > DENSE_SCRATCH_BYTES:
        raise ValueError(
            f"{rows} rows of {in_features}: 128 columns need {block} bytes, there are {DENSE_SCRATCH_BYTES}"
        )
    return min(out_features, DENSE_SCRATCH_BYTES // block * HADAMARD_BLOCK)


class DenseExl3:
    """One EXL3 matrix on a GPU: y = x @ W.

    trellis int16 [in/16, out/16, 16*K], suh fp16 [in], svh fp16 [out]; they stay the caller's.
    Raises Exl3LoadError if the extension is missing, or has no kernel for this tensor.
    """

    def __init__(self, trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, codebook: Codebook) -> None:
        self.ext = extension()
        self.trellis, self.suh, self.svh = trellis, suh, svh
        self.bits = bits_of(trellis)
        self.flags = codebook_flags(codebook)
        require_instance(self.ext, "gemm", self.bits, codebook)
        self.scratch = dense_scratch(trellis.device)  # taken now: memory taken in a graph's capture is the graph's
        self.has_gemv = self.bits == 4 or (self.bits in (2, 3) and codebook is not Codebook.THREE_INST)
        self.multiprocessors = self.ext.g_get_num_sms(trellis.device.index)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] fp16 or bf16 -> [T, out] of x's type. Inner products are fp16 with fp32 sums.

        Which kernel runs depends on T alone. Can be captured in a CUDA graph once it has run.
        """
        rows = x.to(torch.float16).contiguous()
        if rows.shape[0] > GEMM_ROWS:
            return self._decode_and_multiply(rows, x.dtype)
        out = torch.empty(rows.shape[0], self.svh.shape[0], dtype=torch.float32, device=x.device)
        if rows.shape[0] == 0:
            return out.to(x.dtype)
        rotated = torch.empty_like(rows)
        if rows.shape[0] <= GEMV_ROWS and self.has_gemv:
            self.ext.exl3_gemv(rows, self.trellis, out, self.suh, rotated, self.svh, *self.flags)
        else:
            self._gemm(rows, rotated, out)
        return out.to(x.dtype)

    def _gemm(self, rows: torch.Tensor, rotated: torch.Tensor, out: torch.Tensor) -> None:
        shape = self.shape_index(rows.shape[0])
        # A number of multiprocessors, given, keeps exl3_gemm from timing shapes also where none is forced.
        taken = self.ext.exl3_gemm(
            rows, self.trellis, out, self.suh, rotated, self.svh, shape, *self.flags, self.multiprocessors
        )
        if taken == 0:
            raise RuntimeError(f"exl3_gemm has no kernel for {self.bits:g} bits, {rows.shape[0]} rows, shape {shape}")

    def shape_index(self, rows: int) -> int:
        """exl3_gemm's shape for this many rows: the lowest tile that takes them at once, else the tallest.

        0, the extension's fixed rule for 16-row tiles, up to 16 rows and where no taller tile fits.
        """
        in_features, out_features = self.suh.shape[0], self.svh.shape[0]
        whole, half_rate = int(self.bits), self.bits != int(self.bits)
        fits = [
            (shape, height)
            for shape, height in TALL_SHAPES
            if self.ext.exl3_gemm_shape_compat(shape, rows, in_features, out_features, whole, half_rate)
        ]
        if rows <= 16 or not fits:
            return 0
        enough = [shape for shape, height in fits if height >= rows]
        return enough[-1] if enough else fits[0][0]

    def _decode_and_multiply(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        count, in_features = rows.shape
        out_features = self.svh.shape[0]
        out = torch.empty(count, out_features, dtype=dtype, device=rows.device)
        step = slice_columns(count, in_features, out_features)
        for first in range(0, out_features, step):
            columns = min(step, out_features - first)
            weight_bytes, product_bytes = 2 * in_features * columns, 4 * count * columns
            weight = self.scratch[:weight_bytes].view(torch.float16).view(in_features, columns)
            product = self.scratch[weight_bytes : weight_bytes + product_bytes].view(torch.float32).view(count, columns)
            svh = self.svh[first : first + columns]
            self.ext.reconstruct_had_slice(weight, self.trellis, self.suh, svh, self.bits, *self.flags, first)
            self.ext.hgemm(rows, weight, product)
            out[:, first : first + columns].copy_(product)
        return out
