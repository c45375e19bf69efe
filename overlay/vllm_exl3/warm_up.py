"""Compiles what a start would otherwise compile at first use and that no model is needed for; into the caches that the
environment names.

python -m vllm_exl3.warm_up        on a GPU; fails naming what could not be compiled
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterator

# FlashInfer's modules that this model's attention and sampling use: where its recipe is, and what makes it.
FLASHINFER = {
    "sparse attention": ("flashinfer.jit.mla", "gen_sparse_mla_sm120_module"),
    "sampling": ("flashinfer.jit.sampling", "gen_sampling_module"),
    "top-k": ("flashinfer.jit.topk", "gen_topk_module"),
}
# The draft model's attention: FlashAttention 2, of which a Spark gets PTX that its driver compiles.
DRAFT_HEADS, DRAFT_KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 16


def build_module(module: str, function: str) -> str:
    """Returns what was done."""
    spec = getattr(importlib.import_module(module), function)()
    if getattr(spec, "is_aot", False):
        return "came compiled"
    if spec.is_compiled:
        return "was compiled before"
    spec.build()
    return "compiled"


def run_flash_attention() -> str:
    """One step of four tokens over pages of cache, causal and not: each is a kernel of its own."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    make = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")
    query, pages = make(4, DRAFT_HEADS, HEAD_SIZE), make(2, PAGE, DRAFT_KV_HEADS, HEAD_SIZE)
    starts, used = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, 4], [20]))
    table = torch.tensor([[0, 1]], dtype=torch.int32, device="cuda")
    for causal in (True, False):
        flash_attn_varlen_func(
            query, pages, pages, 4, starts, 20, seqused_k=used, causal=causal, block_table=table, fa_version=2
        )  # fmt: skip
    torch.cuda.synchronize()
    return "compiled, or was before"


def steps() -> dict[str, Callable[[], str]]:
    built = {f"FlashInfer: {name}": (lambda where=where: build_module(*where)) for name, where in FLASHINFER.items()}
    return {**built, "FlashAttention": run_flash_attention}


def run(todo: dict[str, Callable[[], str]]) -> Iterator[str]:
    """All steps, also when one fails; yields the names of those that did."""
    for name, step in todo.items():
        began = time.monotonic()
        try:
            said = step()
        except Exception as error:  # whatever a compiler or a driver raises: told, and the next one tried
            said = f"failed: {type(error).__name__}: {error}"
            yield name
        print(f"{name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)


def main() -> int:
    failed = list(run(steps()))
    if failed:
        print(f"warm_up: {', '.join(failed)} could not be compiled; each line above says why", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
