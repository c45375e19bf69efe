"""A layer's routed experts on a GPU: which kernel takes which rows, and the scratch they work in. No vLLM import.

Steps of up to `few.most` tokens run on exllamav3's kernels alone; the host sees that from the shape. In steps of
up to `few.split_until` tokens exllamav3's fused kernel takes the experts with up to `few.most` rows and the grouped
kernel the others: every row is taken exactly once, and the grouped kernel adds both up in a fixed order. Longer
steps are its own.
"""

import functools
from dataclasses import dataclass
from enum import Enum

import torch

from vllm_exl3 import ops
from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.few_rows import FusedExperts
from vllm_exl3.format import TILE, Codebook
from vllm_exl3.ops import PackedExperts
from vllm_exl3.reference import swiglu, transform_blocks
from vllm_exl3.switches import Few, Switches

# Rows of one expert that the decoded way multiplies at a time: bounds its scratch.
DECODED_ROWS = 1024


class Many(Enum):
    """What experts with many rows run on."""

    GROUPED = "grouped kernel"
    DECODED = "decoded weights and plain products"


@dataclass(frozen=True)
class Plan:
    few: Few  # what exllamav3's kernels take
    many: Many

    def __str__(self) -> str:
        if not self.few.most:
            return self.many.value
        split = f" (of an expert in steps of up to {self.few.split_until})" if self.few.split_until else ""
        return f"exllamav3's kernels up to {self.few.most} tokens{split}, above {self.many.value}"


def make_plan(bits: tuple[float, float], codebooks: set[Codebook], switches: Switches, capability_major: int) -> Plan:
    """`bits` are those of gate and up, and of down. Raises Exl3LoadError if nothing here takes the layer."""
    if len(codebooks) > 1:
        names = " and ".join(sorted(codebook.value for codebook in codebooks))
        raise Exl3LoadError(f"gate and up, and down have the codebooks {names}; the kernels take one per layer")
    (codebook,) = codebooks
    is_one_rate = bits[0] == bits[1]
    if switches.fat_grouped and not is_one_rate:
        raise Exl3LoadError(
            f"gate and up have {bits[0]:g} bits and down {bits[1]:g}, and the grouped kernel takes one rate per layer; "
            f"EXL3_FAT_GROUPED=0 serves such a checkpoint, more slowly"
        )
    has_fused_kernel = is_one_rate and bits[0] == int(bits[0]) and codebook is not Codebook.THREE_INST
    few = switches.few(capability_major) if has_fused_kernel else Few(0, 0)
    return Plan(few, Many.GROUPED if switches.fat_grouped else Many.DECODED)


@dataclass(frozen=True)
class Geometry:
    """What layers must have in common to share scratch."""

    device: torch.device
    experts: int
    hidden: int
    width: int
    top_k: int
    max_tokens: int
    plan: Plan


class Scratch:
    """workspace: the grouped kernel's, or a decoded matrix; before it runs, exllamav3's fp16 inputs lie there.
    sums: fp32 [tokens, hidden], what exllamav3's kernels give. Neither keeps anything between two calls."""

    def __init__(self, g: Geometry) -> None:
        few = g.plan.few
        few_tokens = min(g.max_tokens, max(few.most, few.split_until))
        sizes = [few_tokens * g.hidden * 2]
        if g.plan.many is Many.GROUPED:
            sizes.append(ops.workspace_bytes(g.max_tokens, g.top_k, g.experts, g.hidden, g.width))
        else:
            sizes.append(g.hidden * g.width * 2)
        summed = g.max_tokens if g.plan.many is Many.DECODED else few_tokens
        self.workspace = torch.empty(max(sizes), dtype=torch.uint8, device=g.device)
        self.sums = torch.empty(summed, g.hidden, dtype=torch.float32, device=g.device)

    @property
    def nbytes(self) -> int:
        return self.workspace.nbytes + self.sums.nbytes


@functools.cache
def shared_scratch(geometry: Geometry) -> Scratch:
    """The one scratch of all layers of this geometry; made at the first call."""
    return Scratch(geometry)


def has_shared_suh(w13_suh: torch.Tensor) -> bool:
    """Whether gate and up of every expert have the same input scales: fp16 [experts, 2, hidden]."""
    return torch.equal(w13_suh[:, 0], w13_suh[:, 1])


def local_slots(ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Global expert ids -> this rank's, -1 for those of another rank or of none."""
    if expert_map is None:
        return ids
    return torch.where(ids < 0, ids, expert_map[ids.clamp_min(0).long()])


class GpuExperts:
    """The routed experts of one layer. `experts` must not move: kernels keep addresses.

    Scratch is taken here, for steps of up to `max_tokens`; longer ones are refused. Raises Exl3LoadError where a
    kernel is missing.
    """

    def __init__(self, experts: PackedExperts, *, limit: float | None, top_k: int, max_tokens: int, plan: Plan) -> None:
        ops.load()
        self.experts, self.limit, self.plan, self.max_tokens = experts, limit, plan, max_tokens
        device = experts.w13_trellis.device
        sizes = experts.count, experts.hidden, experts.width
        self.scratch = shared_scratch(Geometry(device, *sizes, top_k, max_tokens, plan))
        self.few = None
        if plan.few.most:
            partition = min(max_tokens, plan.few.split_until) if max_tokens > plan.few.most else 0
            self.few = FusedExperts(
                experts, limit=limit, top_k=top_k, cap=plan.few.most, partition_tokens=partition
            )  # fmt: skip

    @property
    def scratch_bytes(self) -> int:
        """Of the scratch that this layer shares with all others of its sizes."""
        return self.scratch.nbytes + (self.few.scratch.nbytes if self.few else 0)

    def run(
        self,
        x: torch.Tensor,  # bf16 or fp16 [tokens, hidden]
        topk_ids: torch.Tensor,  # [tokens, k], global ids where there is a map
        topk_weights: torch.Tensor,  # fp32 [tokens, k]
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The local experts' weighted sums [tokens, hidden] in x's dtype. Capturable in a CUDA graph unless the plan
        is to decode. Raises RuntimeError for more tokens than scratch was made for."""
        if x.shape[0] > self.max_tokens:
            raise RuntimeError(f"{x.shape[0]} tokens in a step: scratch was made for {self.max_tokens} at most")
        if not x.shape[0]:
            return torch.empty_like(x)
        x, weights = x.contiguous(), topk_weights.float().contiguous()
        ids = topk_ids.to(torch.int32).contiguous()
        tokens, few = x.shape[0], self.plan.few
        if tokens > max(few.most, few.split_until):
            return self._run_many(x, ids, weights, expert_map, None)
        sums = self.scratch.sums[:tokens]
        step = self._fp16(x), local_slots(ids, expert_map), weights, sums
        if tokens <= few.most:
            self.few.run(*step)
            return sums.to(x.dtype)
        self.few.run_partition(*step)
        return self._run_many(x, ids, weights, expert_map, sums)

    def _fp16(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float16:
            return x
        return self.scratch.workspace[: x.numel() * 2].view(torch.float16).view(x.shape).copy_(x)

    def _run_many(self, x, ids, weights, expert_map, addend: torch.Tensor | None) -> torch.Tensor:
        if self.plan.many is Many.DECODED:
            return self._run_decoded(x, local_slots(ids, expert_map), weights, addend)
        out = torch.empty_like(x)
        ops.fat_moe(
            x, ids, weights, self.experts, out=out, workspace=self.scratch.workspace, limit=self.limit,
            expert_map=expert_map, min_rows=self.plan.few.most_rows(x.shape[0]) + 1, addend=addend,
        )  # fmt: skip
        return out

    # Decoded weights: for comparison. Reads the routing on the host.

    def _run_decoded(self, x, slots, weights, addend: torch.Tensor | None) -> torch.Tensor:
        sums = self.scratch.sums[: x.shape[0]]
        if addend is None:
            sums.zero_()
        counts = torch.bincount(slots[slots >= 0], minlength=self.experts.count).tolist()
        for expert in [expert for expert, count in enumerate(counts) if count > self.plan.few.most_rows(x.shape[0])]:
            token, place = (slots == expert).nonzero(as_tuple=True)
            for rows in torch.arange(len(token), device=x.device).split(DECODED_ROWS):
                picked = token[rows]
                result = self._one_expert(x[picked], expert) * weights[picked, place[rows], None]
                sums.index_add_(0, picked, result)
        return sums.to(x.dtype)

    def _one_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """fp32 [rows, hidden]. Roundings are the kernels': inputs of a product are fp16."""
        e = self.experts
        gate, up = (
            self._product(rows, e.w13_trellis[expert, side], e.w13_suh[expert, side], e.w13_svh[expert, side])
            for side in (0, 1)
        )
        inner = swiglu(gate, up, self.limit).half()
        return self._product(inner, e.w2_trellis[expert], e.w2_suh[expert], e.w2_svh[expert])

    def _product(self, rows, trellis, suh, svh) -> torch.Tensor:
        rotated = transform_blocks((rows.half() * suh).float()).half()
        shape = trellis.shape[0] * TILE, trellis.shape[1] * TILE
        inner = self.scratch.workspace[: shape[0] * shape[1] * 2].view(torch.float16).view(shape)
        ops.decode_inner(trellis, self.experts.codebook, inner)
        return transform_blocks(torch.mm(rotated, inner, out_dtype=torch.float32)) * svh.float()
