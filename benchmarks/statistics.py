"""Medians with their spread, and ratios of what was measured side by side. Plain numbers in, plain numbers out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 20260
CONFIDENCE = 0.95

Rows = Sequence[Sequence[float]]
"""[rounds][tasks]."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, its 95 % bootstrap interval, and one sample per round."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    def to_dict(self) -> dict[str, float | list[float]]:
        """Return the estimate in JSON types."""
        return {"median": self.median, "low": self.low, "high": self.high, "samples": list(self.samples)}


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the quantile between the nearest two of `values` (one at least), linearly."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(values: Sequence[float]) -> float:
    """Return the middle of `values` (one at least)."""
    return quantile(values, 0.5)


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of `samples` with its percentile bootstrap interval; the same samples give the same interval.

    Source: Efron, Bootstrap methods: another look at the jackknife (1979).
    """
    return _bootstrapped(lambda rounds: median([samples[number] for number in rounds]), samples)


def paired_speedup(baseline: Rows, times: Rows) -> Estimate:
    """Return how many times faster `times` are than `baseline`, both [rounds][tasks] seconds for the same work.

    Of each task the median over rounds of times / baseline is taken, each ratio of two runs side by side, so that
    neither a slow phase of the machine nor a single disturbed run counts; tasks weigh as long as the baseline takes
    for them. The interval resamples whole rounds; `samples` are the rounds' own ratios of sums.
    """
    ratios = [[b / a for a, b in zip(*rows, strict=True)] for rows in zip(baseline, times, strict=True)]

    def speedup(rounds: Sequence[int]) -> float:
        weights = _task_medians(baseline, rounds)
        weighted = (weight * ratio for weight, ratio in zip(weights, _task_medians(ratios, rounds), strict=True))
        return sum(weights) / sum(weighted)

    samples = [sum(before) / sum(after) for before, after in zip(baseline, times, strict=True)]
    return _bootstrapped(speedup, samples)


def _task_medians(rows: Rows, rounds: Sequence[int]) -> list[float]:
    return [median([rows[number][task] for number in rounds]) for task in range(len(rows[0]))]


def _bootstrapped(statistic: Callable[[Sequence[int]], float], samples: Sequence[float]) -> Estimate:
    generator, rounds = random.Random(BOOTSTRAP_SEED), range(len(samples))
    resampled = [statistic(generator.choices(rounds, k=len(samples))) for _ in range(NUM_RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    return Estimate(statistic(rounds), quantile(resampled, tail), quantile(resampled, 1 - tail), tuple(samples))
