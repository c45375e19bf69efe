"""Calls the grouped kernel with poisoned outputs and scratch, between guards that must stay as they were."""

import torch
from vllm_exl3 import ops

GUARD_BYTES = 4096
GUARD = 0xA5
POISON = 0xFF  # NaN in every floating-point type


class Guarded:
    """A buffer of `size` bytes with guards on both sides."""

    def __init__(self, size: int, device, poison: int = POISON) -> None:
        self.whole = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
        self.inside = self.whole[GUARD_BYTES : GUARD_BYTES + size]
        self.inside.fill_(poison)

    def check(self, what: str) -> None:
        for side, guard in (
            ("before", self.whole[:GUARD_BYTES]),
            ("after", self.whole[len(self.whole) - GUARD_BYTES :]),
        ):
            assert bool((guard == GUARD).all()), f"{what}: bytes {side} it were written"


def run(x, routing, experts, *, limit=10.0, out_dtype=torch.float32, poison: int = POISON, **named) -> torch.Tensor:
    """ops.fat_moe on fresh, poisoned buffers."""
    size = ops.workspace_bytes(routing.tokens, routing.top_k, experts.count, experts.hidden, experts.width)
    workspace = Guarded(size, x.device, poison)
    out = Guarded(x.numel() * out_dtype.itemsize, x.device, poison)
    result = out.inside.view(out_dtype).view(x.shape)
    ops.fat_moe(
        x, routing.ids, routing.weights, experts, out=result, workspace=workspace.inside, limit=limit, **named
    )  # fmt: skip
    torch.cuda.synchronize()
    out.check("out")
    workspace.check("workspace")
    return result
