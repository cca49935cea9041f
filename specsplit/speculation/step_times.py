"""The curve of a forward's seconds by its rows, as measured at the start and corrected by every round.

Knows no mode; the table of constants gives the origin of the windows and steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import le, mul
from typing import Generic, TypeVar

from specsplit.core.types import Timings
from specsplit.speculation.constants import (
    CORRECTION_HALVING,
    CORRECTION_STEP,
    FORK_BASE,
    IN_DOUBT,
    LONG_TEXT,
    MAX_BEYOND,
    MAX_HALVINGS,
    MAX_PENDING,
    MAX_STEP_SESSIONS,
    MEDIAN_WINDOW,
    MIN_OBSERVED,
    MOST_APART,
    PLAIN_FORGIVENESS,
    RATIO_WINDOW,
    RECENT_PLAIN,
    ROW_COST,
    ROW_GRID,
    SLOW_START,
    STALE,
    STALE_FORGIVENESS,
)

_Number = TypeVar("_Number", int, float)


class RunningMedian(Generic[_Number]):
    """The median of the last few values, so that a machine that stalls now and then changes nothing."""

    __slots__ = ("_recent", "value")

    def __init__(self, initial: _Number, window: int = MEDIAN_WINDOW, *, is_counted: bool = False) -> None:
        self._recent: deque[_Number] = deque([initial] if is_counted else [], maxlen=window)
        self.value = initial
        """The median, of two middle values the lower; `initial` before the first value."""

    @property
    def is_observed(self) -> bool:
        return bool(self._recent)

    def observe(self, value: _Number) -> None:
        """Count a value, unless it is infinite or no number."""
        if math.isfinite(value):
            self._recent.append(value)
            self.value = sorted(self._recent)[(len(self._recent) - 1) // 2]


def doubted(value: float) -> RunningMedian[float]:
    """Return a median that does not believe the next value alone, which may be of a slower moment."""
    return RunningMedian(value, is_counted=True)


def rows_s(seconds: float, forks_s: float) -> float:
    """Return the part of a forward's seconds that its rows take, half of them at least; branches take `forks_s`."""
    return max(seconds - forks_s, seconds / 2)


class StepTimes:
    """Seconds of one forward by its rows: measured on a grid, non-decreasing, straight in between, corrected online.

    Beyond the grid the last slope goes on, or that of the whole curve if it is steeper: corrections that have made two
    points equal say nothing of hundreds of rows. An observation counts for the nearest grid point, as a ratio to what
    was measured at the start. The point follows the median of its last ratios, from the third on, and its neighbours
    follow by part of its correction, since most causes (a longer context, a busier machine) are common to all.
    The first point, that of a plain forward, is slowed by its own observations alone: a tree costs more than its rows,
    and a plain forward believed slow is never run, so that nobody would see the mistake. If they have slowed it,
    forwards of other sizes lead it slowly back to what was measured at the start, so that it is tried again. If the
    first forwards of all are quicker than was measured, as after a start beside other work, the whole curve is at once.
    Without `has_plain` it is like the others. A point that was not seen for long is believed about as slow as those
    that are, since what slowed it may be over.
    """

    def __init__(self, measured: Mapping[int, float], fork_s: float = 0.0, *, has_plain: bool = True) -> None:
        assert min(measured, default=0) >= 1, "at least one point, and a forward has rows"
        assert all(0 < seconds < math.inf for seconds in measured.values()), "times are positive"
        self.rows = sorted(measured)
        self._seconds = self.measured = _non_decreasing([measured[rows] for rows in self.rows], [1] * len(measured))
        self._curve: list[float] = []
        """Seconds by number of rows, as far as they were asked for since the last correction."""
        self._middles = [math.sqrt(low * high) for low, high in pairwise(self.rows)]  # where another point is nearer
        # A correction of point p counts for point q by _weights[p][q].
        self._weights = [
            [0.5 ** (abs(math.log2(other / rows)) / CORRECTION_HALVING) for other in self.rows] for rows in self.rows
        ]
        self._points = [_Point() for _ in self.rows]
        self._plain = self._points[0] if has_plain else None
        self.fork_s = fork_s  # that each further branch of a tree takes beside its rows
        self._num_counted = 0
        self._first: list[float] = []  # ratios, whatever their rows
        self._pending: list[tuple[float, float, bool]] = []
        """Rows and seconds that the curve does not know yet: each round observes, but not each round reads."""

    @classmethod
    def from_start(cls, step_times: Sequence[tuple[int, float]], fork_s: float = 0.0) -> StepTimes:
        """Return the curve that begins with the times by rows that a worker measured when it started.

        Other work beside that start made some of them longer and none shorter. So no forward takes longer than one of
        more rows, nor than as many forwards of fewer rows as have its rows. A slow model has time for few sizes: the
        others follow, since a forward corrects the nearest size, and a start of one size says nothing of their costs.
        """
        if len(step_times) == 1:
            return cls.from_one_row(step_times[0][1])
        rows = [count for count, _ in step_times]
        possible = [min([seconds * -(-count // of) for of, seconds in step_times]) for count in rows]
        points = sorted({*rows, *ROW_GRID})
        return cls(dict(zip(points, _interpolate(rows, possible, points), strict=True)), fork_s)

    @classmethod
    def from_one_row(cls, seconds: float) -> StepTimes:
        """Return the curve of which no more is known than what a forward of one row takes."""
        return cls({rows: seconds * (1 + ROW_COST * (rows - 1)) for rows in ROW_GRID})

    @property
    def is_start_slow(self) -> bool:
        """Whether rounds have shown that the start measured something else than these forwards."""
        if self._pending:
            self._catch_up()
        return min([point.correction for point in self._points]) < math.log(SLOW_START)

    @property
    def grid(self) -> dict[int, float]:
        """The curve as it stands, at the grid's points."""
        self._catch_up()
        return dict(zip(self.rows, self._seconds, strict=True))

    def seconds(self, rows: float) -> float:
        """Return the seconds of a forward of this many rows."""
        if self._pending:
            self._catch_up()
        return _interpolate(self.rows, self._seconds, (rows,))[0]

    def covers(self, rows: float) -> bool:
        """Return whether so many rows are not too far beyond the grid for the curve to say anything of them."""
        return rows <= MAX_BEYOND * self.rows[-1]

    def curve(self, max_rows: int) -> Sequence[float]:
        """Return the seconds by number of rows up to `max_rows` at least; entry 0 stands for no forward.

        A decision compares many trees, so it reads this list instead of asking for each.
        """
        if self._pending:
            self._catch_up()
        curve = self._curve
        if len(curve) <= max_rows:
            curve += _interpolate(self.rows, self._seconds, range(len(curve), max_rows + 1))
        return curve

    def shared_curve(self, max_rows: int, num_sessions: int) -> Sequence[float]:
        """Return the seconds by the rows of each of so many sessions that share the forward; entry 0 as in `curve`."""
        if num_sessions == 1:
            return self.curve(max_rows)
        if self._pending:
            self._catch_up()
        return _interpolate(self.rows, self._seconds, range(0, (max_rows + 1) * num_sessions, num_sessions))

    def count_worth_verifying(self, log_probs: Sequence[float], tokens_per_s: float, rows: int = 1) -> int:
        """Return how many nodes are worth their rows, at the tokens per second that the target gives at present.

        `log_probs` are the nodes' path estimates, the likeliest first; `rows` are the rows of the step without them,
        all sessions together. On a smooth curve a node is verified if and only if P(node) > tokens_per_s * dt_v/dn; on
        a staircase the nodes of one stair are weighed together.
        """
        # A whole stair may pay where its first node alone does not, so the search goes on beyond a loss.
        curve = self.curve(rows + len(log_probs))
        gain = best = 0.0
        count, before_s = 0, curve[rows]
        for node, log_prob in enumerate(log_probs, 1):
            gain += math.exp(log_prob)
            net = gain - tokens_per_s * (curve[rows + node] - before_s)
            if net > best:
                count, best = node, net
        return count

    def observe(self, rows: float, seconds: float, *, is_rare: bool = False) -> None:
        """Correct the curve by a forward that took `seconds`; without rows or a positive time it is no observation.

        Nor is one far beyond the grid, such as a step with a prompt: what the slope says there is no measurement.
        What was seen before a forward that `is_rare` is long ago.
        """
        if rows <= 0 or not self.covers(rows) or not 0 < seconds < math.inf:
            return
        self._pending.append((rows, seconds, is_rare))
        if len(self._pending) == MAX_PENDING:
            self._catch_up()

    def _catch_up(self) -> None:
        # Ratios to the first measurement, not to the present curve, so that the order of observations hardly matters.
        pending, self._pending = self._pending, []
        for rows, seconds, is_rare in pending:
            nearest = bisect_left(self._middles, rows)
            (measured,) = _interpolate(self.rows, self.measured, (rows,))
            point, ratio = self._points[nearest], math.log(seconds / measured)
            if is_rare or self._is_stale(point):
                self._begin_anew(nearest, ratio, is_rare=is_rare)
            self._num_counted = point.observed_at = self._num_counted + 1
            point.ratios.append(ratio)
            point.num_observed += 1
            self._observe_first(ratio)
            if point.num_observed >= MIN_OBSERVED:
                median = sorted(point.ratios)[(len(point.ratios) - 1) // 2]
                self._correct(nearest, median - point.correction)
        # A size that was never seen gives way to those that were.
        weights = [1 + min(point.num_observed, RATIO_WINDOW) for point in self._points]
        factors = [math.exp(point.correction) for point in self._points]
        self._seconds = _non_decreasing(list(map(mul, self.measured, factors)), weights)
        self._curve = []

    def _observe_first(self, ratio: float) -> None:
        """Correct all points at once if the first forwards are quicker: the start was measured beside other work."""
        if len(self._first) < MIN_OBSERVED:
            self._first.append(ratio)
            if len(self._first) == MIN_OBSERVED:
                common = min(0.0, sorted(self._first)[MIN_OBSERVED // 2])
                for point in self._points:
                    point.correction = common

    def _is_stale(self, point: _Point) -> bool:
        """Return whether a point was not seen for so long that the machine may be another by now."""
        return self._num_counted - point.observed_at > STALE << point.num_vain

    def _begin_anew(self, nearest: int, ratio: float, *, is_rare: bool) -> None:
        """Forget what a point was long ago, and believe at once that it is quicker: nothing quickens a forward."""
        point = self._points[nearest]
        fall = ratio - point.correction
        if is_rare and fall > -IN_DOUBT:
            return  # the quicker half of all would lead the point down
        point.begin_anew()
        if fall > IN_DOUBT:
            point.num_vain = min(point.num_vain + 1, MAX_HALVINGS)
        if fall < 0:
            for other, weight in zip(self._points, self._weights[nearest], strict=True):
                if other is point or (other is not self._plain and (is_rare or self._is_stale(other))):
                    other.correction += weight * fall
            point.forgiven, point.num_vain = 0.0, 0

    def _correct(self, nearest: int, error: float) -> None:
        seen, plain = self._points[nearest], self._plain
        # The first correction of a point is the whole error, the next half of it, and so on down to CORRECTION_STEP.
        step = max(CORRECTION_STEP, 1 / (seen.num_observed - MIN_OBSERVED + 1))
        # What the point was forgiven in vain is no news of the others.
        own = min(max(error, 0.0), seen.forgiven / step)
        seen.forgiven -= step * own
        seen.correction += step * error
        most_s = self.measured[nearest] * math.exp(seen.correction)
        for number, (point, weight) in enumerate(zip(self._points, self._weights[nearest], strict=True)):
            if point is not seen and point is not plain:
                is_new = point.num_observed < MIN_OBSERVED
                point.correction += (step if is_new else CORRECTION_STEP) * weight * (error - own)
            # Fewer rows that are believed slower than these are believed wrongly.
            is_disproved = number < nearest and self.measured[number] * math.exp(point.correction) > most_s
            share = STALE_FORGIVENESS if self._is_stale(point) else 0.0
            if share or is_disproved:
                least = max(seen.correction, 0.0) if point is plain else seen.correction
                point.forgive(least, MOST_APART / weight, share)
        if plain is not None and seen is not plain and plain.correction > 0:
            plain.correction *= PLAIN_FORGIVENESS


class _Point:
    """The observations at one point of the grid; corrections are logarithms of factors on the measured times."""

    __slots__ = ("correction", "forgiven", "num_observed", "num_vain", "observed_at", "ratios")

    def __init__(self) -> None:
        self.correction = 0.0
        self.ratios: deque[float] = deque(maxlen=RATIO_WINDOW)
        self.num_observed = 0
        self.observed_at = 0
        """The number of its last observation, counted over all points."""
        self.forgiven = 0.0
        """The part of the correction that was taken back without an observation."""
        self.num_vain = 0
        """Times in a row that this was in vain: each doubles how long it takes to begin again."""

    def begin_anew(self) -> None:
        self.ratios.clear()
        self.num_observed = 0

    def forgive(self, seen: float, most_apart: float, share: float) -> None:
        """Believe it about as slow as a point that is seen: what had slowed both may be over."""
        if seen < self.correction:
            most = min(self.correction, seen + most_apart)
            believed = most + share * (seen - most)
            self.forgiven += self.correction - believed
            self.correction = believed


def forwards_s(timings: Timings) -> float:
    """Return the seconds of the forwards with their picks.

    A row's pick costs what it costs whoever asks, so it is part of the row; a large vocabulary's is no trifle.
    """
    return (timings.device_ms + timings.sampling_ms) / 1e3


def step_rows(timings: Timings) -> int:
    """Return the rows of the step of a verify; of one that does not tell, as if each session in it had as many."""
    return timings.step_rows or timings.num_tokens * step_sessions(timings)


def step_sessions(timings: Timings) -> int:
    """Return how many sessions shared the steps, as far as a worker's word about it can be true."""
    return min(max(timings.batch_size, 1), MAX_STEP_SESSIONS)


class PlainTimes:
    """Plain forwards of a session alone: what one took at the start, and so much more for each token of its text.

    That was measured at the start, too, or is learned from rounds behind long texts.
    """

    def __init__(self) -> None:
        self.start_s = self.fork_s = self.text_token_s = 0.0
        """Seconds of a plain forward, of a further branch of a tree, and of a token of the text; 0 if not measured."""
        self.branches_read_text = False
        """Whether each branch attends to all of the text anew, as torch's kernel for CPUs does."""
        self._more_s = deque[float](maxlen=RECENT_PLAIN)

    def observe(self, timings: Timings, length: int) -> bool:
        """Count a round behind so many tokens, unless others shared its step; return whether their cost is new."""
        if length >= LONG_TEXT and timings.batch_size == 1:
            more_s = max(timings.device_ms / 1e3 - self.start_s, 0.0) / length
            if timings.num_tokens == 1 or (self._more_s and more_s < min(self._more_s)):
                self._more_s.append(more_s)  # of a round with a tree it is a bound
                return len(self._more_s) == MIN_OBSERVED and not self.text_token_s
        return False

    def token_s(self, length: int) -> float:
        """Return the seconds that each token of so long a text adds to a forward; 0 if little is known of it.

        The least that was seen lately, or what was measured at the start unless each of the last rounds took less.
        """
        measured_s, more_s = self.text_token_s, self._more_s
        if measured_s:
            return min(measured_s, max(more_s)) if len(more_s) == RECENT_PLAIN else measured_s
        is_known = length >= LONG_TEXT and self.start_s and len(more_s) >= MIN_OBSERVED
        return min(more_s) if is_known else 0.0

    def branch_tokens(self, length: int) -> int:
        """Return the tokens of so long a text that a further branch reads, beside those that were measured with it."""
        if not self.branches_read_text:
            return 0
        return max(length - FORK_BASE, 0) if self.fork_s and self.text_token_s else length

    def seconds(self, length: int) -> float:
        """Return the seconds of a forward behind so long a text, as the start or the quickest of the last ones says.

        Until there are enough of these, one that something disturbed is not believed: it is what the start's was.
        """
        if self.text_token_s:
            return self.start_s + length * self.token_s(length)
        return self.start_s + (length * min(self._more_s) if len(self._more_s) == RECENT_PLAIN else 0.0)


def _interpolate(rows: Sequence[int], seconds: Sequence[float], points: Iterable[float]) -> list[float]:
    """Return the curve at each of the points; many at once, since a call costs more than the arithmetic."""
    found: list[float] = []
    for at in points:
        if at <= rows[0] or len(rows) == 1:
            found.append(seconds[0])
            continue
        high = min(bisect_left(rows, at), len(rows) - 1)
        slope = (seconds[high] - seconds[high - 1]) / (rows[high] - rows[high - 1])
        if at > rows[high]:  # a row that computes for others, too, never gets cheaper the more there are
            slope = max(slope, (seconds[high] - seconds[0]) / (rows[high] - rows[0]))
        found.append(seconds[high] + (at - rows[high]) * slope)
    return found


def _non_decreasing(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Return the nearest non-decreasing values: falling neighbours get their mean (pool adjacent violators)."""
    if all(map(le, values, values[1:])):
        return list(values)
    # Invariant: the means of the blocks rise; a value below the last mean joins that block, and so on backwards.
    blocks: list[tuple[float, int, int]] = []
    for value, weight in zip(values, weights, strict=True):
        total, mass, count = value * weight, weight, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / mass:
            above, mass_above, num_above = blocks.pop()
            total, mass, count = total + above, mass + mass_above, count + num_above
        blocks.append((total, mass, count))
    return [total / mass for total, mass, count in blocks for _ in range(count)]
