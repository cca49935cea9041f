"""Times of forwards and of the ways to the workers, as measured at the start and corrected by every round.

A forward counts with the sampling of its rows, which a step cannot go without.

Seconds throughout. Knows no mode; the table of constants gives the origin of the windows and steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import le, mul
from typing import Generic, Literal, TypeVar

from specsplit.core.types import Identity, Timings
from specsplit.speculation.constants import (
    CORRECTION_HALVING,
    CORRECTION_STEP,
    MAX_PENDING,
    MAX_STEP_SESSIONS,
    MAX_STEPS_AWAY,
    MEDIAN_WINDOW,
    MIN_OBSERVED,
    PLAIN_FORGIVENESS,
    RATIO_WINDOW,
    ROW_COST,
    ROW_GRID,
    STEPS_AWAY_SLACK,
)

_Number = TypeVar("_Number", int, float)
RoundCourse = Literal["plain", "tree", "behind tree"]
"""A round without nodes, one with nodes, and one without nodes right behind one with nodes."""


class RunningMedian(Generic[_Number]):
    """The median of the last few values, so that a machine that stalls now and then changes nothing."""

    __slots__ = ("_recent", "value")

    def __init__(self, initial: _Number, window: int = MEDIAN_WINDOW) -> None:
        self._recent: deque[_Number] = deque(maxlen=window)
        self.value = initial
        """The median, of two middle values the lower; `initial` before the first value."""

    def observe(self, value: _Number) -> None:
        """Count a value, unless it is infinite or no number."""
        if math.isfinite(value):
            self._recent.append(value)
            self.value = sorted(self._recent)[(len(self._recent) - 1) // 2]


class StepTimes:
    """Seconds of one forward by its rows: measured on a grid, non-decreasing, straight in between, corrected online.

    Beyond the grid the last slope goes on, or that of the whole curve if it is steeper: corrections that have made two
    points equal say nothing of hundreds of rows. An observation counts for the nearest grid point, as a ratio to what
    was measured at the start. The point follows the median of its last ratios, from the third on, and its neighbours
    follow by part of its correction, since most causes (a longer context, a busier machine) are common to all.
    The first point, that of a plain forward, is slowed by its own observations alone: a tree costs more than its rows,
    and a plain forward believed slow is never run, so that nobody would see the mistake. Forwards of other sizes lead
    it slowly back to what was measured at the start, so that it is tried again. If the first forwards of all are
    quicker than was measured, as after a start beside other work, the whole curve is at once.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        assert measured, "at least one point"
        assert min(measured) >= 1, "a forward has rows"
        assert all(0 < seconds < math.inf for seconds in measured.values()), "times are positive"
        self._rows = sorted(measured)
        self._measured = _non_decreasing([measured[rows] for rows in self._rows])
        self._seconds = self._measured
        self._curve: list[float] = []
        """Seconds by number of rows, as far as they were asked for since the last correction."""
        # A grid point ends where another one becomes the nearest, in ratio.
        self._middles = [math.sqrt(low * high) for low, high in pairwise(self._rows)]
        # A correction of point p counts for point q by _weights[p][q].
        self._weights = [
            [0.5 ** (abs(math.log2(other / rows)) / CORRECTION_HALVING) for other in self._rows] for rows in self._rows
        ]
        self._corrections = [0.0] * len(self._rows)
        """Logarithms of the factors on the measured times."""
        self._ratios: list[deque[float]] = [deque(maxlen=RATIO_WINDOW) for _ in self._rows]
        self._num_observed = [0] * len(self._rows)
        self._first: list[float] = []
        """The first ratios, whatever their rows."""
        self._pending: list[tuple[float, float]] = []
        """Rows and seconds that the curve does not know yet: each round observes, but not each round reads."""

    @property
    def grid(self) -> dict[int, float]:
        """The curve as it stands, at the grid's points."""
        self._catch_up()
        return dict(zip(self._rows, self._seconds, strict=True))

    def seconds(self, rows: float) -> float:
        """Return the seconds of a forward of this many rows."""
        if self._pending:
            self._catch_up()
        return _interpolate(self._rows, self._seconds, (rows,))[0]

    def curve(self, max_rows: int) -> Sequence[float]:
        """Return the seconds by number of rows up to `max_rows` at least; entry 0 stands for no forward.

        A decision compares many trees, so it reads this list instead of asking for each.
        """
        if self._pending:
            self._catch_up()
        curve = self._curve
        if len(curve) <= max_rows:
            curve += _interpolate(self._rows, self._seconds, range(len(curve), max_rows + 1))
        return curve

    def shared_curve(self, max_rows: int, num_sessions: int) -> Sequence[float]:
        """Return the seconds by the rows of each of so many sessions that share the forward; entry 0 as in `curve`."""
        if num_sessions == 1:
            return self.curve(max_rows)
        if self._pending:
            self._catch_up()
        return _interpolate(self._rows, self._seconds, range(0, (max_rows + 1) * num_sessions, num_sessions))

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

    def observe(self, rows: float, seconds: float) -> None:
        """Correct the curve by a forward that took `seconds`; without rows or a positive time it is no observation."""
        if rows <= 0 or not 0 < seconds < math.inf:
            return
        self._pending.append((rows, seconds))
        if len(self._pending) == MAX_PENDING:
            self._catch_up()

    def _catch_up(self) -> None:
        # Ratios to the first measurement, not to the present curve, so that the order of observations hardly matters.
        pending, self._pending = self._pending, []
        for rows, seconds in pending:
            nearest = bisect_left(self._middles, rows)
            ratios = self._ratios[nearest]
            (measured,) = _interpolate(self._rows, self._measured, (rows,))
            ratios.append(math.log(seconds / measured))
            self._observe_first(ratios[-1])
            count = self._num_observed[nearest] = self._num_observed[nearest] + 1
            if count >= MIN_OBSERVED:
                median = sorted(ratios)[(len(ratios) - 1) // 2]
                self._correct(nearest, median - self._corrections[nearest])
        self._seconds = _non_decreasing(list(map(mul, self._measured, map(math.exp, self._corrections))))
        self._curve = []

    def _observe_first(self, ratio: float) -> None:
        """Correct all points at once if the first forwards are quicker: the start was measured beside other work."""
        if len(self._first) < MIN_OBSERVED:
            self._first.append(ratio)
            if len(self._first) == MIN_OBSERVED:
                self._corrections = [min(0.0, sorted(self._first)[MIN_OBSERVED // 2])] * len(self._rows)

    def _correct(self, nearest: int, error: float) -> None:
        # The first correction of a point is the whole error, the next half of it, and so on down to CORRECTION_STEP.
        step = max(CORRECTION_STEP, 1 / (self._num_observed[nearest] - MIN_OBSERVED + 1))
        for point, weight in enumerate(self._weights[nearest]):
            is_new = point == nearest or self._num_observed[point] < MIN_OBSERVED
            if point or not nearest:
                self._corrections[point] += (step if is_new else CORRECTION_STEP) * weight * error
        if nearest:
            self._corrections[0] *= PLAIN_FORGIVENESS


class DraftTimes:
    """Seconds of one propose: a fixed part per call, the way to the draft and back included, and its levels."""

    def __init__(self, level: StepTimes, call_s: float = 0.0) -> None:
        self.level = level
        self._call = RunningMedian(call_s)

    @property
    def call_s(self) -> float:
        return self._call.value

    def seconds(self, num_levels: int, rows: float) -> float:
        """Return the seconds until a tree of this many levels, each of `rows` rows, is here."""
        return self.call_s + num_levels * self.level.seconds(rows) if num_levels else 0.0

    def observe(self, num_levels: int, rows: float, device_s: float, wall_s: float | None) -> None:
        """Count a propose: `device_s` in its levels' forwards, `wall_s` as its caller saw it, None if nobody did."""
        if num_levels > 0:
            self.level.observe(rows, device_s / num_levels)
            if wall_s is not None:
                self._call.observe(max(wall_s - device_s, 0.0))


class DecodingSessions:
    """How many sessions of this process are behind their prompts, at one target."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class StepSessions:
    """Sessions that share the target's steps: the share of those here that lately did, and as many others as lately.

    So a change of the number here shows at once, and not after some rounds that were planned for another load.
    """

    def __init__(self, here: DecodingSessions) -> None:
        self._here = here
        self._share, self._others = RunningMedian(1.0), RunningMedian(0)

    def observe(self, num_sessions: int) -> None:
        """Count a step with so many sessions."""
        here = max(self._here.count, 1)
        self._share.observe(min(num_sessions / here, 1.0))
        self._others.observe(max(num_sessions - here, 0))

    @property
    def value(self) -> int:
        return max(round(self._share.value * max(self._here.count, 1)), 1) + self._others.value


class WorkerTimes:
    """Seconds of the target's and the draft's work and of the ways to them."""

    def __init__(self, here: DecodingSessions | None = None) -> None:
        self.verify: StepTimes | None = None
        """Target forwards by rows."""
        self.verify_concurrent: StepTimes | None = None
        """Target forwards while the draft is at work: on one machine they slow each other down."""
        self.has_seen_plain = False
        """Whether a forward of one row was measured."""
        self.draft: DraftTimes | None = None
        self.num_proposals = 0
        """Proposes that were answered."""
        self._round_trip = RunningMedian(0.0)
        self._least_ping_s: float | None = math.inf
        """None as soon as a verify has measured the round trip better."""
        self._overhead = RunningMedian(0.0)
        self._has_plain_gap = False
        self.sessions = StepSessions(here or DecodingSessions())
        self._tree, self._behind_tree = RunningMedian(0.0), RunningMedian(0.0)

    @property
    def gap_s(self) -> float:
        """Seconds between two target forwards in a round without a draft: the round trip and the orchestrator's own."""
        return self._round_trip.value + self._overhead.value

    @property
    def tree_s(self) -> float:
        """Seconds that having nodes at all costs, beside their rows: in a round, and in a plain one behind it.

        A plain forward behind a tree is slower than one behind another plain forward, whose code and memory are warm.
        """
        return max(0.0, self._tree.value) + max(0.0, self._behind_tree.value)

    def adopt(self, target: Identity, draft: Identity | None) -> None:
        """Begin with what the workers measured themselves, unless more is known already."""
        if self.verify is None and target.step_times:
            self.verify = StepTimes(dict(target.step_times))
            self.has_seen_plain = target.step_times[0][0] == 1
        if self.draft is None and draft is not None and draft.step_times:
            self.draft = DraftTimes(StepTimes(dict(draft.step_times)))

    def observe_verify(self, timings: Timings, wall_s: float | None, *, is_concurrent: bool = False) -> None:
        """Count a verify of a round after the prompt's; `is_concurrent` if the draft was at work meanwhile.

        `wall_s` is None for a step of a stream, which nobody waited for.
        """
        # A row's pick costs what it costs whoever asks, so it is part of the row; a large vocabulary's is no trifle.
        rows, device_s = _step_rows(timings), (timings.device_ms + timings.sampling_ms) / 1e3
        if rows <= 0 or device_s <= 0:
            return
        self.sessions.observe(_step_sessions(timings))
        if self.verify is None:
            one_row_s = device_s / (1 + ROW_COST * (rows - 1))
            self.verify = StepTimes({point: one_row_s * (1 + ROW_COST * (point - 1)) for point in ROW_GRID})
        if is_concurrent:
            if self.verify_concurrent is None:
                self.verify_concurrent = StepTimes(self.verify.grid)
            self.verify_concurrent.observe(rows, device_s)
        else:
            self.verify.observe(rows, device_s)
        self.has_seen_plain |= timings.num_tokens == 1
        if wall_s is not None:
            self._least_ping_s = None
            self._round_trip.observe(max(wall_s - device_s, 0.0))

    def observe_ping(self, wall_s: float) -> None:
        """Count a ping of the target: its round trip, as long as no verify was measured."""
        if self._least_ping_s is not None:  # the least of them, since the first one may have had a connection to make
            self._least_ping_s = min(wall_s, self._least_ping_s)
            self._round_trip = RunningMedian(self._least_ping_s)

    def observe_propose(self, timings: Timings, wall_s: float | None) -> None:
        """Count a propose that was answered; `wall_s` is None if nobody waited, so that it says nothing of the call."""
        self.num_proposals += 1
        levels, device_s = timings.num_forwards, (timings.device_ms + timings.sampling_ms) / 1e3
        if levels <= 0 or device_s <= 0:
            return
        rows = max(_step_rows(timings) / levels, 1.0)
        if self.draft is None:
            self.draft = DraftTimes(StepTimes(dict.fromkeys(ROW_GRID, device_s / levels)))
        self.draft.observe(levels, rows, device_s, wall_s)

    def observe_round(
        self, timings: Timings, verify_s: float, overhead_s: float, course: RoundCourse, *, is_concurrent: bool
    ) -> None:
        """Count a round that is not streamed: its verify, and the rest of it outside of waits for the draft."""
        overhead_s = max(overhead_s, 0.0)
        if course == "behind tree" and self._has_plain_gap and self.verify is not None:
            self.sessions.observe(_step_sessions(timings))
            self._behind_tree.observe(verify_s + overhead_s - self.verify.seconds(self.sessions.value) - self.gap_s)
            return
        # What a plain round has beside its forward is measured in plain rounds, as soon as there was one.
        is_gap = course == "plain" or not self._has_plain_gap
        if course == "plain" and not self._has_plain_gap:
            self._has_plain_gap, self._overhead, self._round_trip = True, RunningMedian(0.0), RunningMedian(0.0)
        self.observe_verify(timings, verify_s if is_gap else None, is_concurrent=is_concurrent)
        if is_gap:
            self._overhead.observe(overhead_s)
        else:
            forward_s = (timings.device_ms + timings.sampling_ms) / 1e3
            self._tree.observe(verify_s - forward_s + overhead_s - self.gap_s)

    def count_steps_away(self, nodes: int) -> int:
        """Return how many verifies of so many nodes the target does while a commit and its answer travel."""
        if self.verify is None:
            return 0
        forwards = self._round_trip.value / self.verify.seconds((nodes + 1) * self.sessions.value)
        return min(math.ceil(forwards - STEPS_AWAY_SLACK), MAX_STEPS_AWAY)

    def probe_s(self, nodes: int, depth: int) -> float:
        """Return the seconds to have put aside for a probe: the draft's for its tree, a plain forward's at most.

        A draft that is believed slow would else not be asked for a hundred times that long, though it may have measured
        its times beside other work; what a probe takes is counted once it is known.
        """
        if self.draft is None or not depth:
            return 0.0
        drafting_s = depth * self.draft.level.seconds(-(-nodes // depth))
        return min(drafting_s, self.verify.seconds(1)) if self.verify is not None else drafting_s


def _step_rows(timings: Timings) -> int:
    """Return the rows of the steps that served a call, if each session in them had as many as this one."""
    return timings.num_tokens * _step_sessions(timings)


def _step_sessions(timings: Timings) -> int:
    """Return how many sessions shared the steps, as far as a worker's word about it can be true."""
    return min(max(timings.batch_size, 1), MAX_STEP_SESSIONS)


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


def _non_decreasing(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing values: falling neighbours get their mean (pool adjacent violators)."""
    if all(map(le, values, values[1:])):
        return list(values)
    # Invariant: the means of the blocks rise; a value below the last mean joins that block, and so on backwards.
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            above, num_above = blocks.pop()
            total, count = total + above, count + num_above
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]
