"""The compiled kernels as torch operators: loads them on demand, and the only module that does.

`_kernels.so` is made by overlay/build_kernels.py. It needs no GPU to be loaded.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.format import TILE, Codebook

LIBRARY = Path(__file__).with_name("_kernels.so")
NAMES = ("fat_moe", "fat_moe_workspace_bytes", "decode_inner")

KERNELS_MISSING = (
    f"{LIBRARY}: is not there, and EXL3 weights on a GPU need it; install the plugin with kernels: "
    'EXL3_CUDA_ARCHS="12.1a" pip install --no-build-isolation overlay/'
)

# As in csrc/fat_moe.h.
CODEBOOK_NUMBER = {Codebook.THREE_INST: 0, Codebook.MCG: 1, Codebook.MUL1: 2}
# For these the kernel is tuned; the others go through its generic decoder.
TUNED_BITS = (3, 4, 5, 6)
TUNED_CODEBOOKS = (Codebook.MCG, Codebook.MUL1)


@functools.cache
def load():
    """The namespace `torch.ops.vllm_exl3`. Raises Exl3LoadError where the kernels are missing or do not load."""
    if not LIBRARY.is_file():
        raise Exl3LoadError(KERNELS_MISSING)
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        reason = error.__cause__ or error
        raise Exl3LoadError(f"{LIBRARY}: does not load with torch {torch.__version__}: {reason}") from error
    missing = [name for name in NAMES if not hasattr(torch.ops.vllm_exl3, name)]
    if missing:
        raise Exl3LoadError(f"{LIBRARY}: has no operator {', '.join(missing)}; build it again")
    # None returns a tensor, so there is nothing to make up.
    for name in ("fat_moe", "decode_inner"):
        torch.library.register_fake(f"vllm_exl3::{name}", lambda *args, **named: None)
    return torch.ops.vllm_exl3


@dataclass(frozen=True)
class PackedExperts:
    """All local experts of a layer in the checkpoint's layout; shapes as in `moe.Exl3MoEMethod`."""

    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor
    codebook: Codebook
    shared_suh: bool  # gate and up of every expert have the same suh

    @property
    def count(self) -> int:
        return self.w13_trellis.shape[0]

    @property
    def hidden(self) -> int:
        return self.w13_suh.shape[-1]

    @property
    def width(self) -> int:
        return self.w2_suh.shape[-1]

    @property
    def bits(self) -> float:
        return self.w13_trellis.shape[-1] / TILE


def is_tuned(bits: float, codebook: Codebook) -> bool:
    return bits in TUNED_BITS and codebook in TUNED_CODEBOOKS


def workspace_bytes(tokens: int, top_k: int, experts: int, hidden: int, width: int) -> int:
    """Bytes of scratch that `fat_moe` needs for at most `tokens` tokens."""
    return load().fat_moe_workspace_bytes(tokens, top_k, experts, hidden, width)


def fat_moe(
    x: torch.Tensor,  # fp16 or bf16 [tokens, hidden]
    topk_ids: torch.Tensor,  # int32 [tokens, k]; negative ids are skipped
    topk_weights: torch.Tensor,  # fp32 [tokens, k]
    experts: PackedExperts,
    *,
    out: torch.Tensor,  # fp16, bf16 or fp32 [tokens, hidden]; every element is written
    workspace: torch.Tensor,  # uint8, at least workspace_bytes()
    limit: float | None,  # of SwiGLU
    expert_map: torch.Tensor | None = None,  # int32 [global experts]: local slot or -1
    min_rows: int = 1,  # experts with fewer rows are left out
    addend: torch.Tensor | None = None,  # fp32 [tokens, hidden], added to the sum
) -> None:
    """The experts' weighted sums in one deterministic pass; capturable in a CUDA graph. RuntimeError names what
    does not fit."""
    load().fat_moe(
        x,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        expert_map=expert_map,
        w13_trellis=experts.w13_trellis,
        w13_suh=experts.w13_suh,
        w13_svh=experts.w13_svh,
        w2_trellis=experts.w2_trellis,
        w2_suh=experts.w2_suh,
        w2_svh=experts.w2_svh,
        codebook=CODEBOOK_NUMBER[experts.codebook],
        shared_suh=experts.shared_suh,
        limit=math.inf if limit is None else limit,
        min_rows=min_rows,
        addend=addend,
        workspace=workspace,
        out=out,
    )


def decode_inner(trellis: torch.Tensor, codebook: Codebook, inner: torch.Tensor) -> None:
    """trellis int16 [in/16, out/16, 16*K] -> inner fp16 [in, out], before the outer transforms."""
    load().decode_inner(trellis, CODEBOOK_NUMBER[codebook], inner=inner)
