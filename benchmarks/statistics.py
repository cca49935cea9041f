"""Medians with their intervals, and ratios of times measured side by side. Plain numbers in, plain numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 20260
CONFIDENCE = 0.95
_BATCH = 200
"""Resamples computed at once; more of them need more memory than they save time."""

Rows = Sequence[Sequence[float]]
"""Seconds, [rounds][tasks]."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, its 95 % bootstrap interval, and one sample per round."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate in JSON types."""
        return {**asdict(self), "samples": list(self.samples)}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of docs/performance.md: `value` is to be at least, at most or exactly `bound`."""

    id: str
    measure: str
    value: Estimate
    relation: Literal[">=", "<=", "=="]
    bound: float
    note: str = ""

    @property
    def is_met(self) -> bool:
        value = self.value.median
        if self.relation == ">=":
            return value >= self.bound
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
    """Return the median of `samples` with its interval; the same samples give the same interval."""
    values = np.asarray(samples, np.float64)
    return _bootstrapped(lambda rounds: np.median(values[rounds], axis=-1), samples)


def paired_speedup(baseline: Rows, times: Rows) -> Estimate:
    """Return how many times faster `times` are than `baseline`, both [rounds][tasks] seconds for the same work.

    For each task the median over rounds of times / baseline is taken, each ratio of two runs side by side, so that
    neither a slow phase of the machine nor a single disturbed run counts; tasks weigh as long as the baseline takes
    for them. The interval resamples whole rounds; `samples` are the rounds' own ratios of sums.
    """
    before, after = np.asarray(baseline, np.float64), np.asarray(times, np.float64)
    ratios = after / before

    def speedup(rounds: NDArray[np.int64]) -> Floats:
        # [..., rounds] -> [..., rounds, tasks] -> medians over rounds, then sums over tasks.
        weights = np.median(before[rounds], axis=-2)
        return weights.sum(-1) / (weights * np.median(ratios[rounds], axis=-2)).sum(-1)

    return _bootstrapped(speedup, (before.sum(-1) / after.sum(-1)).tolist())


def _bootstrapped(statistic: Callable[[NDArray[np.int64]], Floats], samples: Sequence[float]) -> Estimate:
    """Return a statistic of rounds with its percentile interval over resampled rounds."""
    rounds = np.arange(len(samples))
    value = float(statistic(rounds))
    if len(samples) < 2:
        return Estimate(value, value, value, tuple(samples))
    # Imported here: the processes that are measured need no more than `median`, and scipy takes a second to import.
    from scipy.stats import bootstrap

    found = bootstrap(
        (rounds,),
        lambda drawn, axis: statistic(drawn),
        n_resamples=NUM_RESAMPLES,
        batch=_BATCH,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=BOOTSTRAP_SEED,
    )
    return Estimate(value, float(found.confidence_interval.low), float(found.confidence_interval.high), tuple(samples))
