"""Times of a target's rounds: its forwards, and what they have beside them.

Seconds throughout. Knows no mode.
"""

from __future__ import annotations

from typing import Literal

from specsplit.speculation.step_times import RunningMedian, StepTimes

RoundCourse = Literal["plain", "tree", "behind tree"]
"""A round without nodes, one with nodes, and one without nodes right behind one with nodes."""


class TargetTimes:
    """Seconds of the target's forwards and beside them, of one session alone or of several that share its steps."""

    __slots__ = ("_behind_tree", "_has_plain_gap", "_overhead", "_round_trip", "_tree", "verify", "verify_concurrent")

    def __init__(self, verify: StepTimes, round_trip_s: float = 0.0, overhead_s: float = 0.0) -> None:
        self.verify = verify
        """Forwards by the rows of a step."""
        self.verify_concurrent: StepTimes | None = None
        """While the draft is at work: on one machine they slow each other down."""
        self._round_trip, self._overhead = RunningMedian(round_trip_s), RunningMedian(overhead_s)
        self._has_plain_gap = False
        self._tree, self._behind_tree = RunningMedian(0.0), RunningMedian(0.0)

    def for_several(self) -> TargetTimes:
        """Return what steps of several sessions begin with."""
        return TargetTimes(StepTimes(self.verify.grid), self.round_trip_s, self._overhead.value)

    @property
    def round_trip_s(self) -> float:
        return self._round_trip.value

    @property
    def gap_s(self) -> float:
        """Seconds between two forwards in a round without a draft: the round trip and the orchestrator's own."""
        return self._round_trip.value + self._overhead.value

    @property
    def tree_s(self) -> float:
        """Seconds that having nodes at all costs, beside their rows: in a round, and in a plain one behind it.

        A plain forward behind a tree is slower than one behind another plain forward, whose code and memory are warm.
        Either is at most a plain forward's time: what is more was waited for others.
        """
        most_s = self.verify.seconds(1)
        return min(max(0.0, self._tree.value), most_s) + min(max(0.0, self._behind_tree.value), most_s)

    def expect_round_trip(self, seconds: float) -> None:
        """Take a round trip for what the next ones will be, unless a verify has measured it."""
        if not self._round_trip.is_observed:
            self._round_trip = RunningMedian(seconds)

    def observe_forward(self, rows: int, seconds: float, wall_s: float | None, *, is_concurrent: bool) -> None:
        """Count a forward of a round, and the way to it and back if somebody waited for it, `wall_s` in all."""
        if is_concurrent:
            if self.verify_concurrent is None:
                self.verify_concurrent = StepTimes(self.verify.grid)
            self.verify_concurrent.observe(rows, seconds)
        else:
            self.verify.observe(rows, seconds)
        if wall_s is not None:
            self._round_trip.observe(max(wall_s - seconds, 0.0))

    def observe_round(
        self,
        rows: int,
        forward_s: float,
        verify_s: float,
        overhead_s: float,
        course: RoundCourse,
        *,
        is_concurrent: bool,
    ) -> None:
        """Count a round that is not streamed: its forward, its verify with the way, and the rest of it."""
        if course == "behind tree" and self._has_plain_gap:
            self._behind_tree.observe(verify_s + overhead_s - self.verify.seconds(rows) - self.gap_s)
            return
        # What a plain round has beside its forward is measured in plain rounds, as soon as there was one.
        is_gap = course == "plain" or not self._has_plain_gap
        if course == "plain" and not self._has_plain_gap:
            self._has_plain_gap, self._overhead, self._round_trip = True, RunningMedian(0.0), RunningMedian(0.0)
        self.observe_forward(rows, forward_s, verify_s if is_gap else None, is_concurrent=is_concurrent)
        if is_gap:
            self._overhead.observe(overhead_s)
        else:
            self._tree.observe(verify_s - forward_s + overhead_s - self.gap_s)
