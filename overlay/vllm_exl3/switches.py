"""The two run-time settings of the CUDA path, read once from the environment."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# exllamav3's fused kernel keeps this many rows of an expert at most.
MOST_FEW_ROWS = 128


class Few(NamedTuple):
    """What exllamav3's kernels get: steps of up to `most` tokens and, with `split`, in longer steps the experts with
    up to `most` rows."""

    most: int
    split: bool

    @property
    def most_split(self) -> int:
        """Rows of an expert that are theirs in a longer step."""
        return self.most if self.split else 0


# By the GPU's major capability: on a Spark (12) what owners measured with an older grouped kernel; on Hopper (9) what
# was measured there, where the grouped kernel is the faster one from nine tokens on, however few rows an expert has.
FEW = {9: Few(8, split=False), 12: Few(32, split=True)}
FEW_ELSEWHERE = Few(32, split=True)


class SwitchError(ValueError):
    """A setting with a value that it does not have."""


@dataclass(frozen=True)
class Switches:
    """`fat_grouped`: many rows go to the grouped kernel, else through decoded weights and plain products.
    `fat_crossover`: tokens of a step, and rows of an expert in a longer one, that stay with exllamav3's kernels; None
    leaves it to the device."""

    fat_grouped: bool = True
    fat_crossover: int | None = None

    def few(self, capability_major: int) -> Few:
        if self.fat_crossover is not None:
            return Few(self.fat_crossover, split=self.fat_crossover > 0)
        return FEW.get(capability_major, FEW_ELSEWHERE)


def parse(environment: Mapping[str, str]) -> Switches:
    """Raises SwitchError naming the setting, its value and what it may be. Empty counts as not set."""
    grouped = environment.get("EXL3_FAT_GROUPED", "").strip() or "1"
    if grouped not in ("0", "1"):
        raise SwitchError(f"EXL3_FAT_GROUPED: is {grouped!r}, expected 1 (grouped kernel) or 0 (decoded weights)")
    crossover = environment.get("EXL3_FAT_CROSSOVER", "").strip()
    if crossover and not (crossover.isascii() and crossover.isdigit() and int(crossover) <= MOST_FEW_ROWS):
        raise SwitchError(f"EXL3_FAT_CROSSOVER: is {crossover!r}, expected rows per expert, 0 to {MOST_FEW_ROWS}")
    return Switches(grouped == "1", int(crossover) if crossover else None)


@functools.cache
def switches() -> Switches:
    return parse(os.environ)
