"""Medians with their ranges, and ratios of times measured side by side. Plain numbers in, plain numbers out.

Five rounds or so are too few for an interval of confidence, so the range of the rounds is shown beside a median.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

Rows = Sequence[Sequence[float]]
"""Seconds, [rounds][tasks]."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, one sample per round, and their range."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]
    tasks: tuple[float, ...] = ()
    """What each task alone gives, for a comparison of the same work: often several times further apart than rounds."""

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate in JSON types."""
        return {**asdict(self), "samples": list(self.samples), "tasks": list(self.tasks)}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of docs/performance.md: `value` is to be at least, at most or exactly `bound`."""

    id: str
    measure: str
    value: Estimate
    relation: Literal[">=", "<=", "=="]
    bound: float
    note: str = ""
    lowest: float | None = None
    """Bound of the lowest round too, if there is one; for `>=` alone."""

    @property
    def is_met(self) -> bool:
        value = self.value.median
        if self.relation == ">=":
            return value >= self.bound and (self.lowest is None or self.value.low >= self.lowest)
        if self.relation == "<=":
            return value <= self.bound
        return all(sample == self.bound for sample in self.value.samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in JSON types."""
        return {**asdict(self), "value": self.value.to_dict(), "is_met": self.is_met}


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the quantile between the nearest two of `values` (one at least), linearly."""
    return float(np.quantile(values, fraction))


def median(values: Sequence[float]) -> float:
    """Return the middle of `values` (one at least)."""
    return float(statistics.median(values))


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of `samples` (one at least) with their range."""
    return _ranged(median(samples), samples)


def paired_speedup(baseline: Rows, times: Rows) -> Estimate:
    """Return how many times faster `times` are than `baseline`, both [rounds][tasks] seconds for the same work.

    For each task the median over rounds of times / baseline is taken, each ratio of two runs side by side, so that
    neither a slow phase of the machine nor a single disturbed run counts; tasks weigh as long as the baseline takes
    for them. `samples` are the rounds' own ratios of sums.
    """
    before, after = np.asarray(baseline, np.float64), np.asarray(times, np.float64)
    weights, shares = np.median(before, axis=0), np.median(after / before, axis=0)
    speedup = _ranged(float(weights.sum() / (weights @ shares)), (before.sum(-1) / after.sum(-1)).tolist())
    return replace(speedup, tasks=tuple((1 / shares).tolist()))


def _ranged(value: float, samples: Sequence[float]) -> Estimate:
    return Estimate(value, min(value, *samples), max(value, *samples), tuple(samples))


def range_of(value: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and the highest sample of a published estimate; older files have intervals for low and high."""
    samples = value.get("samples") or (value["low"], value["high"])
    return min(value["median"], *samples), max(value["median"], *samples)
