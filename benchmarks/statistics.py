"""Medians with their spread, and ratios of what was measured side by side. Plain numbers in, plain numbers out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

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
    """Resample rounds; few rounds make few different draws, so each is computed once."""
    generator, rounds = random.Random(BOOTSTRAP_SEED), range(len(samples))
    known: dict[tuple[int, ...], float] = {}

    def drawn() -> float:
        draw = tuple(sorted(generator.choices(rounds, k=len(samples))))
        if draw not in known:
            known[draw] = statistic(draw)
        return known[draw]

    resampled = [drawn() for _ in range(NUM_RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    return Estimate(statistic(rounds), quantile(resampled, tail), quantile(resampled, 1 - tail), tuple(samples))


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and highest fifth (rounded down): disturbed values do not count."""
    ordered = sorted(values)
    cut = len(ordered) // 5
    return fmean(ordered[cut : len(ordered) - cut])


@lru_cache(maxsize=256)
def t_quantile(fraction: float, degrees: float) -> float:
    """Return the quantile (`fraction` from 0.5 to below 1) of Student's t with `degrees` (above 0) of freedom.

    With t = sqrt(degrees) tan(angle) its density is proportional to cos(angle) ** (degrees - 1).
    """

    def area(angle: float) -> float:
        steps = 400  # of Simpson's rule
        width = angle / steps
        heights = [max(0.0, math.cos(width * step)) ** (degrees - 1) for step in range(steps + 1)]
        return width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]))

    half = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(degrees / 2) - math.lgamma((degrees + 1) / 2))
    low, high = 0.0, math.pi / 2 * (1 - 1e-12)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if area(middle) < (fraction - 0.5) * 2 * half else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)
