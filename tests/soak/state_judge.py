"""How far is what an engine remembers from what it would after one cold reading? The soak's second judge.

A row far from the judge's is compared with readings with noise, too (rounding.py): its token may lie between experts.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from judge import NAN, NOISY_READINGS, TIMES_THE_FLOOR
from probes import Probe
from states import CONV, LATENT, POOLS, RECURRENT, TAIL, State

ROW = ", worst row"
ROWS = (LATENT, POOLS)  # kinds that have one row per token or pool
FEW = (CONV, TAIL)  # that are a few tokens, as noisy as rows

# Floors are never taken to be below what rounding alone may do in an arm of other kernels: a few times bf16's 2^-8,
# what rounding to e4m3 usually does, and more for a single row. They are never above what would let another session's
# state pass either, whose error is about 1.
BF16, E4M3, WHOLE_MOST = 2**-6, 2**-5, 0.1
ROW_LEAST, ROW_MOST = 0.05, 0.25
UNSUSPICIOUS = TIMES_THE_FLOOR * ROW_LEAST  # below every bar of rows
MOST_SUSPECTS, MOST_SUSPECTS_SHARE = 8, 0.02  # of the rows of one kind; more are no ties


@dataclass(frozen=True)
class Measured:
    """One kind in one layer of one probe."""

    session: str
    when: str
    length: int
    cached: int
    layer: str
    kind: str
    error: float  # relative; NaN where it is none
    row: int | None = None  # the worst, of tokens or pools

    def finding(self, bar: float) -> dict:
        how = f"{self.error:.4f} away, bar {bar:.4f}" if math.isfinite(self.error) else "not finite numbers"
        where = "" if self.row is None else f" {self.row}"
        hit = f"{self.cached} of them from the cache" if self.cached else "none of them from the cache"
        text = (f"session {self.session}, after the {self.when}, {self.length} tokens, {hit}: {self.kind}{where} of "
                f"{self.layer}: {how}")  # fmt: skip
        return asdict(self) | {"error": self.error if math.isfinite(self.error) else None, "bar": bar, "text": text}


def errors(cold: State, warm: State, again: Callable[[int], State] | None = None) -> list[tuple]:
    """(layer, kind, relative error, worst row or None) of all that the cold one has.

    `again(number)` is the cold one with noise. Raises ValueError where the cold one is no number, or the warm one lacks
    something or has another shape.
    """
    result = []
    for layer, kinds in cold.items():
        for kind, right in kinds.items():
            got = warm.get(layer, {}).get(kind)
            if got is None or got.shape != right.shape:
                has = None if got is None else tuple(got.shape)
                raise ValueError(f"{layer}: {kind} is {has}, alone and cold it is {tuple(right.shape)}.")
            right, got = right.float(), got.float()
            if not right.isfinite().all():
                raise ValueError(f"{layer}: {kind} has no finite numbers in the judging engine. Settle that first.")
            result.append((layer, kind, relative(got - right, right), None))
            if kind in ROWS:
                noisy = again and (lambda number, layer=layer, kind=kind: again(number)[layer][kind].float())
                result.append((layer, kind + ROW, *worst_row(got, right, noisy)))
    return result


def relative(difference: torch.Tensor, right: torch.Tensor) -> float:
    """Frobenius norms. NaN where anything is infinite or NaN."""
    error = (difference.norm() / right.norm().clamp_min(1e-6)).item()
    return error if math.isfinite(error) else NAN


def row_errors(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Relative, infinite where anything is no number. A row that is next to nothing counts as a tenth of the usual."""
    sizes = right.norm(dim=1)
    rows = (got - right).norm(dim=1) / sizes.clamp_min(sizes.mean() / 10).clamp_min(1e-6)
    return rows.nan_to_num(nan=math.inf, posinf=math.inf)


def worst_row(got: torch.Tensor, right: torch.Tensor, noisy=None) -> tuple[float, int | None]:
    """(relative error, which row); of a few far rows the smallest error to any of the readings `noisy(number)`."""
    if not len(right):
        return 0.0, None
    rows = row_errors(got, right)
    suspects = rows > UNSUSPICIOUS
    few = suspects.sum() <= max(MOST_SUSPECTS, MOST_SUSPECTS_SHARE * len(rows))
    for number in range(NOISY_READINGS if noisy and few else 0):
        if not (suspects & (rows > UNSUSPICIOUS)).any():
            break
        rows = torch.where(suspects, torch.minimum(rows, row_errors(got, noisy(number))), rows)
    error, row = rows.max(0)
    return (error.item() if error.isfinite() else NAN), int(row)


def measure(read: Callable[..., State], probes: list[Probe]) -> list[Measured]:
    """`read(tokens)` gives the state after one cold reading, `read(tokens, number)` after one with noise.

    Equal tokens are read once, as long as there are not too many states to keep.
    """
    read = functools.lru_cache(2 * NOISY_READINGS)(read)
    measured = []
    for probe in probes:
        tokens = tuple(probe.tokens)
        found = errors(read(tokens), probe.state, lambda number, tokens=tokens: read(tokens, number))
        measured += [
            Measured(probe.session, probe.when, len(tokens), probe.cached, layer, kind, error, row)
            for layer, kind, error, row in found
        ]
    return measured


def largest(measured: list[Measured]) -> dict[str, float]:
    """Of each kind, of finite errors."""
    result: dict[str, float] = {}
    for one in measured:
        if math.isfinite(one.error):
            result[one.kind] = max(result.get(one.kind, 0.0), one.error)
    return result


def bars(floor: dict[str, float], kv: str) -> dict[str, float]:
    """Kind -> what is too far: three times the plain arm's largest, within what the top of this file says."""
    result = {}
    for kind in (RECURRENT, LATENT, POOLS):
        is_fp8 = kind == POOLS or (kind == LATENT and kv == "fp8")
        result[kind] = TIMES_THE_FLOOR * min(max(floor.get(kind, 0.0), E4M3 if is_fp8 else BF16), WHOLE_MOST)
    for kind in (*FEW, *(kind + ROW for kind in ROWS)):
        result[kind] = TIMES_THE_FLOOR * min(max(floor.get(kind, 0.0), ROW_LEAST), ROW_MOST)
    return result


def verdict(measured: list[Measured], limits: dict[str, float]) -> dict:
    """What of an arm goes into the report."""
    found = [one for one in measured if not one.error <= limits[one.kind]]
    probes = {(one.session, one.when, one.length, one.cached) for one in measured}
    return {
        "states": len(probes),
        "hits": sum(cached > 0 for *_, cached in probes),
        "bars": limits,
        "largest": largest(measured),
        "findings": [one.finding(limits[one.kind]) for one in found],
    }


# Through files


def save(path: Path, probes: list[Probe]) -> None:
    torch.save([vars(probe) for probe in probes], path)


class Bench:
    """The judge of one KV cache: first the plain arm's states, which give the floor, then all others'."""

    def __init__(self, kv: str, read: Callable[..., State]) -> None:
        self.kv, self.read, self.limits = kv, read, None

    def measure(self, path: Path) -> list[Measured] | str:
        """Or what went wrong, so that the judgement of tokens is not lost with it."""
        try:
            probes = [Probe(**one) for one in torch.load(path, weights_only=True)]
            return measure(self.read, probes)
        except Exception as error:  # whatever it is, it is told
            traceback.print_exc()
            return f"the judge could not compare states: {error!r}"

    def take_floor(self, measured: list[Measured] | str) -> None:
        self.limits = measured if isinstance(measured, str) else bars(largest(measured), self.kv)

    def verdict(self, measured: list[Measured] | str) -> dict:
        wrong = measured if isinstance(measured, str) else self.limits if not isinstance(self.limits, dict) else None
        if wrong is not None or self.limits is None:
            return {"error": wrong or "the plain arm's states gave no floor; see its verdict."}
        return verdict(measured, self.limits)
