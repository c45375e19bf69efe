"""How far a result may be from its float64 oracle, and damages that must be too far."""

from dataclasses import dataclass

import torch

# Only to be tightened.
RELATIVE_L2 = 2e-3
WORST_COSINE_DISTANCE = 1e-4


@dataclass(frozen=True)
class Distance:
    relative_l2: float  # of the whole tensor
    worst_cosine: float  # 1 - cosine, of the worst row
    worst_row: int

    @property
    def is_within(self) -> bool:
        return self.relative_l2 <= RELATIVE_L2 and self.worst_cosine <= WORST_COSINE_DISTANCE


def distance(got: torch.Tensor, want: torch.Tensor) -> Distance:
    """got [rows, columns] of any dtype, want the same in float64. Infinities and NaNs must match exactly."""
    assert got.shape == want.shape, f"{list(got.shape)} where {list(want.shape)} was expected"
    got, want = got.double(), want.double()
    odd = ~want.isfinite() | ~got.isfinite()
    if not torch.equal(got[odd].nan_to_num(), want[odd].nan_to_num()) or not torch.equal(got.isnan(), want.isnan()):
        return Distance(float("inf"), float("inf"), int(odd.any(-1).int().argmax()))
    got, want = got.masked_fill(odd, 0), want.masked_fill(odd, 0)
    cosine = _cosine_distance(got, want)
    worst = int(cosine.argmax())
    whole = (got - want).norm() / want.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return Distance(float(whole), float(cosine[worst]), worst)


def _cosine_distance(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Per row; 0 where both are zero, 1 where one is."""
    sizes = got.norm(dim=-1), want.norm(dim=-1)
    both = sizes[0] * sizes[1]
    cosine = (got * want).sum(-1) / both.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(both > 0, 1 - cosine, (sizes[0] != sizes[1]).double())


def check(got: torch.Tensor, want: torch.Tensor) -> Distance:
    found = distance(got, want)
    assert found.is_within, f"{found}, allowed are {RELATIVE_L2} and {WORST_COSINE_DISTANCE}"
    return found


# Damages: from the oracle's outputs of every (token, k) pair, [tokens, top_k, hidden], a wrong sum.


def scaled(slots: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return slots.sum(1) * 1.02


def slice_dropped(slots: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    out = slots.sum(1)
    out[:, 16:32] = 0
    return out


def weight_doubled(slots: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    token, place = _last_row(local)
    out = slots.sum(1)
    out[token] += slots[token, place]
    return out


def last_row_missing(slots: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    token, place = _last_row(local)
    out = slots.sum(1)
    out[token] -= slots[token, place]
    return out


def _last_row(local: torch.Tensor) -> tuple[int, int]:
    """The (token, k) pair of the last row of the fullest expert's segment."""
    expert = local[local >= 0].mode().values
    token, place = (local == expert).nonzero()[-1].tolist()
    return token, place


# That two experts are swapped needs another oracle, which the test computes.
DAMAGES = (scaled, slice_dropped, weight_doubled, last_row_missing)
