"""Straight lines through samples that depend on those before them: how fast a quantity grows, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

PERIOD_S = 600.0
"""Slopes are per ten minutes."""
_SIGMAS = 2.0
"""Half the width of a 95 % interval in standard errors."""
_MOST_CORRELATION = 0.95
Verdict = Literal["flat", "unclear", "grows"]


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth in ten minutes, and half the width of its 95 % interval."""

    per_period: float
    half_width: float

    def verdict(self, limit: float) -> Verdict:
        """Return whether the growth is below `limit`, above it, or cannot be told from so few samples."""
        if self.per_period - self.half_width > limit:
            return "grows"
        return "flat" if self.per_period + self.half_width < limit else "unclear"


def slope_of(at_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the least-squares slope of `values` over `at_s`.

    Memory in use hardly moves from one sample to the next, so a sample says little that its neighbour did not. The
    interval counts n (1 - r) / (1 + r) samples instead of n, where r is the correlation of neighbouring residuals.
    """
    assert len(at_s) == len(values) > 2, "a line needs three samples at least"
    times, found = np.asarray(at_s) / PERIOD_S, np.asarray(values, dtype=float)
    times = times - times.mean()
    spread = float(times @ times)
    per_period = float(times @ found) / spread
    residuals = found - found.mean() - per_period * times
    squares = float(residuals @ residuals)
    if squares <= 1e-12 * len(found):
        return Slope(per_period, 0.0)
    correlation = min(_MOST_CORRELATION, max(0.0, float(residuals[1:] @ residuals[:-1]) / squares))
    num_free = max(1.0, len(found) * (1 - correlation) / (1 + correlation) - 2)
    return Slope(per_period, _SIGMAS * math.sqrt(squares / (num_free * spread)))
