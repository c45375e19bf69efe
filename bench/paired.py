"""What paired throughputs say: ratios of neighbours in time, their median, how sure it is, and whether a bar holds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

LEAST_PAIRS = 30  # fewer say nothing about a percent


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median by order statistics, for 6 values or more: how many lie below it is binomial, here by
    its normal approximation (Conover, Practical Nonparametric Statistics, confidence intervals for quantiles)."""
    half = 0.98 * math.sqrt(len(values))
    found = sorted(values)
    low = max(0, math.floor((len(found) - 1) / 2 - half))
    return found[low], found[len(found) - 1 - low]


@dataclass(frozen=True)
class Comparison:
    """One measure. Rates in tokens/s, entry i of each list taken one after the other: with all guards, without any,
    and with all guards again, which shows what two equal ways differ by."""

    name: str
    bar: float  # the share of throughput that the guards may cost
    on: list[float]
    off: list[float]
    again: list[float]

    @property
    def is_enough(self) -> bool:
        return len(self.on) >= LEAST_PAIRS

    @property
    def ratio(self) -> float:
        """Throughput with guards over that without."""
        return statistics.median(ratios(self.on, self.off))

    @property
    def control(self) -> float:
        return statistics.median(ratios(self.on, self.again))

    @property
    def holds(self) -> bool:
        return self.ratio >= 1 - self.bar

    @property
    def word(self) -> str:
        """PASS or FAIL by the median; NONE where pairs are too few, or two equal ways differ by more than the bar."""
        if not self.is_enough or abs(self.control - 1) > self.bar:
            return "NONE"
        return "PASS" if self.holds else "FAIL"

    @property
    def range(self) -> tuple[float, float]:
        return interval(ratios(self.on, self.off))

    @property
    def control_range(self) -> tuple[float, float]:
        return interval(ratios(self.on, self.again))

    def doubts(self) -> list[str]:
        """Why the numbers say less than the verdict sounds."""
        low, high = self.range
        found = []
        if high - low > self.bar:
            found.append(f"the interval is {high - low:.1%} wide, more than the bar: more --seconds narrow it")
        if abs(self.control - 1) > self.bar:
            found.append(f"two equal ways differ by {abs(self.control - 1):.1%}, more than the bar: run it again")
        return found

    def brief(self) -> str:
        rate = f"{statistics.median(self.on):.0f} tokens/s"
        return f"{self.name} {rate}, on/off {self.ratio:.4f}, on/on {self.control:.4f}"

    def verdict(self) -> str:
        if not self.is_enough:
            return f"NONE {self.name}: {len(self.on)} pairs, {LEAST_PAIRS} are needed; give it more --seconds"
        low, high = self.range
        text = f"{self.name}: on/off {self.ratio:.4f} (95 %: {low:.4f} to {high:.4f}), {1 - self.bar:.2f} needed"
        return "; ".join([f"{self.word} {text}", *self.doubts()])

    def numbers(self) -> dict:
        return {
            "name": self.name, "bar": self.bar, "pairs": len(self.on), "verdict": self.word, "ratio": self.ratio,
            "range": self.range, "control": self.control, "control_range": self.control_range, "doubts": self.doubts(),
            "rates": {"on": self.on, "off": self.off, "again": self.again},
        }  # fmt: skip


HEADINGS = ("measure", "on, tokens/s", "off, tokens/s", "on/off", "95 %", "on/on", "95 %", "pairs", "bar", "verdict")


def table(comparisons: list[Comparison]) -> list[str]:
    """Markdown, for RESULTS.md."""
    rows = [HEADINGS, ["---"] * len(HEADINGS), *(_cells(one) for one in comparisons if one.is_enough)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _cells(one: Comparison) -> list[str]:
    spans = [f"{low:.4f} to {high:.4f}" for low, high in (one.range, one.control_range)]
    rates = [f"{statistics.median(values):.0f}" for values in (one.on, one.off)]
    return [one.name, *rates, f"{one.ratio:.4f}", spans[0], f"{one.control:.4f}", spans[1], str(len(one.on)),
            f"{1 - one.bar:.2f}", one.word]  # fmt: skip
