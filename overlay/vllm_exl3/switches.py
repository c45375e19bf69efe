"""The run-time settings of the plugin, read once from the environment."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm_exl3 import guards

MLA_GEOMETRIES = ("auto", "native", "padded", "compact")

# exllamav3's fused kernel keeps this many rows of an expert at most.
MOST_FEW_ROWS = 128


class Few(NamedTuple):
    """What exllamav3's kernels get: steps of up to `most` tokens, and in longer steps of up to `split_until` tokens the
    experts with up to `most` rows."""

    most: int
    split_until: int

    def most_rows(self, tokens: int) -> int:
        """Rows of an expert that are theirs in a step of more than `most` tokens."""
        return self.most if tokens <= self.split_until else 0


# Splitting needs a buffer row for each row of theirs. On an H200 the grouped kernel is faster alone long before that;
# on a Spark neither way was measured in longer steps, so that memory decides.
SPLIT_UNTIL = 16  # times `most`

# By the GPU's major capability: on a Spark (12) what owners measured with an older grouped kernel; on Hopper (9) what
# bench/moe.py says: the grouped kernel is a sixth faster at 8 tokens, however few rows an expert has.
FEW = {9: Few(2, 0), 12: Few(32, SPLIT_UNTIL * 32)}
FEW_ELSEWHERE = FEW[12]


class SwitchError(ValueError):
    """A setting with a value that it does not have."""


@dataclass(frozen=True)
class Switches:
    """`fat_grouped`: many rows go to the grouped kernel, else through decoded weights and plain products.
    `fat_crossover`: tokens of a step, and rows of an expert in a longer one, that stay with exllamav3's kernels; None
    leaves it to the device. `mla_geometry` and `pdl` count on SM12x only (docs/architecture.md). `guards_off`: names of
    guards.NAMES that are left out."""

    fat_grouped: bool = True
    fat_crossover: int | None = None
    mla_geometry: str = "auto"
    pdl: bool = False
    guards_off: tuple[str, ...] = ()

    def few(self, capability_major: int) -> Few:
        if self.fat_crossover is not None:
            return Few(self.fat_crossover, SPLIT_UNTIL * self.fat_crossover)
        return FEW.get(capability_major, FEW_ELSEWHERE)


def parse(environment: Mapping[str, str]) -> Switches:
    """Raises SwitchError naming the setting, its value and what it may be. Empty counts as not set."""
    grouped = environment.get("EXL3_FAT_GROUPED", "").strip() or "1"
    if grouped not in ("0", "1"):
        raise SwitchError(f"EXL3_FAT_GROUPED: is {grouped!r}, expected 1 (grouped kernel) or 0 (decoded weights)")
    crossover = environment.get("EXL3_FAT_CROSSOVER", "").strip()
    if crossover and not (crossover.isascii() and crossover.isdigit() and int(crossover) <= MOST_FEW_ROWS):
        raise SwitchError(f"EXL3_FAT_CROSSOVER: is {crossover!r}, expected rows per expert, 0 to {MOST_FEW_ROWS}")
    geometry = environment.get("MLA_GEOMETRY", "").strip() or "auto"
    if geometry not in MLA_GEOMETRIES:
        raise SwitchError(f"MLA_GEOMETRY: is {geometry!r}, expected one of {', '.join(MLA_GEOMETRIES)}")
    pdl = environment.get("PDL", "").strip() or "0"
    if pdl not in ("0", "1"):
        raise SwitchError(f"PDL: is {pdl!r}, expected 0 (off) or 1 (programmatic dependent launch on SM12x)")
    off = tuple(name.strip() for name in environment.get("EXL3_GUARDS_OFF", "").split(",") if name.strip())
    if unknown := [name for name in off if name not in guards.NAMES]:
        raise SwitchError(f"EXL3_GUARDS_OFF: names {unknown[0]!r}, expected some of {', '.join(guards.NAMES)}")
    return Switches(grouped == "1", int(crossover) if crossover else None, geometry, pdl == "1", off)


@functools.cache
def switches() -> Switches:
    return parse(os.environ)
