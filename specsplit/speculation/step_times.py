"""Times of forwards as they were measured and as they are corrected online. Seconds throughout.

Knows no worker and no mode.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import le, mul

_WINDOW = 5
_MIN_OBSERVED = 3
_MOST_WAITING = 32
"""Observations that a curve takes in at once, if nobody asks it before."""
_STEP = 0.25
"""How much of an error one observation corrects; the first ones of a place correct more, being all that is known."""
_HALVING = 3.0
"""Doublings of the number of rows over which half of a correction is believed."""


class RunningMedian:
    """The median of the last few values, so that a machine that stalls now and then changes nothing."""

    def __init__(self, initial: float = 0.0, window: int = 9) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._value: float | None = initial

    @property
    def value(self) -> float:
        """The median; `initial` before the first value."""
        if self._value is None:
            self._value = _median(self._recent)
        return self._value

    def observe(self, value: float) -> None:
        """Count a value; what is not finite is none."""
        if math.isfinite(value):
            self._recent.append(value)
            self._value = None


class StepTimes:
    """Seconds of one forward by its rows: measured on a grid, non-decreasing, straight in between, corrected online.

    Beyond the grid the last slope goes on. An observation counts for the nearest grid point, as a ratio to what was
    measured at the start. The point follows the median of its last ratios, from the third on, and its neighbours
    follow by part of its correction, since most causes (a longer context, a busier machine) are common to all.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        assert measured, "at least one point"
        assert min(measured) >= 1, "a forward has rows"
        assert all(0 < seconds < math.inf for seconds in measured.values()), "times are positive"
        self._rows = sorted(measured)
        self._measured = _non_decreasing([measured[rows] for rows in self._rows])
        self._seconds = self._measured
        self._known: dict[float, float] = {}
        """What was asked for since the last correction: a decision asks for the same rows many times."""
        self._middles = [math.sqrt(low * high) for low, high in pairwise(self._rows)]
        """Where another grid point becomes the nearest, in ratio."""
        self._parts = [
            [0.5 ** (abs(math.log2(other / rows)) / _HALVING) for other in self._rows] for rows in self._rows
        ]
        """Which part of a point's correction each of the others believes."""
        self._corrections = [0.0] * len(self._rows)
        """Logarithms of what the measured times are multiplied by."""
        self._ratios: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in self._rows]
        self._num_observed = [0] * len(self._rows)
        """At each point."""
        self._observed: list[tuple[float, float]] = []
        """Rows and seconds that the curve does not know yet: a round observes, and not every round asks."""

    @property
    def grid(self) -> dict[int, float]:
        """The curve as it stands, at the grid's points."""
        self._catch_up()
        return dict(zip(self._rows, self._seconds, strict=True))

    def seconds(self, rows: float) -> float:
        """Return the seconds of a forward of this many rows."""
        if self._observed:
            self._catch_up()
        seconds = self._known.get(rows)
        if seconds is None:
            seconds = self._known[rows] = _interpolate(self._rows, self._seconds, rows)
        return seconds

    def observe(self, rows: float, seconds: float) -> None:
        """Correct the curve by a forward that took `seconds`; without rows or a positive time it is no observation."""
        if rows <= 0 or not 0 < seconds < math.inf:
            return
        self._observed.append((rows, seconds))
        if len(self._observed) == _MOST_WAITING:
            self._catch_up()

    def _catch_up(self) -> None:
        observed, self._observed = self._observed, []
        for rows, seconds in observed:
            self._correct(rows, seconds)

    def _correct(self, rows: float, seconds: float) -> None:
        nearest = bisect_left(self._middles, rows)
        ratios = self._ratios[nearest]
        ratios.append(math.log(seconds / _interpolate(self._rows, self._measured, rows)))
        count = self._num_observed[nearest] = self._num_observed[nearest] + 1
        if count < _MIN_OBSERVED:
            return
        error = _median(ratios) - self._corrections[nearest]
        step = max(_STEP, 1 / (count - _MIN_OBSERVED + 1))
        for point, part in enumerate(self._parts[nearest]):
            is_new = point == nearest or self._num_observed[point] < _MIN_OBSERVED
            self._corrections[point] += (step if is_new else _STEP) * part * error
        self._seconds = _non_decreasing(list(map(mul, self._measured, map(math.exp, self._corrections))))
        self._known.clear()


class DraftTimes:
    """Seconds of one propose: a fixed part per call, the way to the draft and back included, and its levels."""

    def __init__(self, level: StepTimes, call_s: float = 0.0) -> None:
        self.level = level
        self._call = RunningMedian(call_s)

    @property
    def call_s(self) -> float:
        return self._call.value

    def seconds(self, num_levels: float, rows: float) -> float:
        """Return the seconds until a tree of this many levels, each of `rows` rows, is here."""
        return self.call_s + num_levels * self.level.seconds(rows) if num_levels else 0.0

    def observe(self, num_levels: int, rows: float, device_s: float, wall_s: float | None) -> None:
        """Count a propose: `device_s` in its levels' forwards, `wall_s` as its caller saw it, None if nobody did."""
        if num_levels > 0:
            self.level.observe(rows, device_s / num_levels)
            if wall_s is not None:
                self._call.observe(max(wall_s - device_s, 0.0))


def _interpolate(rows: Sequence[int], seconds: Sequence[float], at: float) -> float:
    if at <= rows[0] or len(rows) == 1:
        return seconds[0]
    high = min(bisect_left(rows, at), len(rows) - 1)
    slope = (seconds[high] - seconds[high - 1]) / (rows[high] - rows[high - 1])
    return seconds[high] + (at - rows[high]) * slope


def _non_decreasing(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing values: where they fall, their mean (pool adjacent violators)."""
    if all(map(le, values, values[1:])):
        return list(values)
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            above, num_above = blocks.pop()
            total, count = total + above, count + num_above
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


def _median(values: Sequence[float] | deque[float]) -> float:
    """Return the middle one; of two the lower."""
    return sorted(values)[(len(values) - 1) // 2]
