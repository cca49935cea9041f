"""Times beside the forwards of rounds: the way to the target, the orchestrator's own time, trees, other sessions.

Seconds throughout. Knows no mode.
"""

from __future__ import annotations

from typing import Literal

from specsplit.speculation.step_times import RunningMedian

RoundCourse = Literal["plain", "tree", "behind tree"]
"""A round without nodes, one with nodes, and one without nodes right behind one with nodes."""


class BesideTimes:
    """Seconds beside the forwards, of one session alone or of several that share its steps."""

    __slots__ = ("_behind_tree", "_has_plain_gap", "_overhead", "_round_trip", "_session", "_tree")

    def __init__(self, round_trip_s: float = 0.0, overhead_s: float = 0.0) -> None:
        self._round_trip, self._overhead = RunningMedian(round_trip_s), RunningMedian(overhead_s)
        self._has_plain_gap = False
        self._tree, self._behind_tree, self._session = RunningMedian(0.0), RunningMedian(0.0), RunningMedian(0.0)

    def for_several(self) -> BesideTimes:
        """Return what rounds of several sessions begin with."""
        begun = BesideTimes(self.round_trip_s, self._overhead.value)
        begun._tree, begun._behind_tree = RunningMedian(self._tree.value), RunningMedian(self._behind_tree.value)
        return begun

    @property
    def round_trip_s(self) -> float:
        return self._round_trip.value

    @property
    def gap_s(self) -> float:
        """Seconds between two forwards in a round without a draft: the round trip and the orchestrator's own."""
        return self._round_trip.value + self._overhead.value

    @property
    def session_s(self) -> float:
        """Seconds that each further session adds to a step beside its rows: its attention to a context of its own."""
        return self._session.value

    def tree_s(self, most_s: float) -> float:
        """Return the seconds that having nodes at all costs, in a round and in a plain one behind it.

        A plain forward behind a tree is slower than one behind another plain forward, whose code and memory are warm.
        Either is believed to be `most_s` at most: what is more was waited for others.
        """
        return min(max(0.0, self._tree.value), most_s) + min(max(0.0, self._behind_tree.value), most_s)

    def expect_round_trip(self, seconds: float) -> None:
        """Take a round trip for what the next ones will be, unless a verify has measured it."""
        if not self._round_trip.is_observed:
            self._round_trip = RunningMedian(seconds)

    def observe_session(self, seconds: float) -> None:
        """Count what a further session added to a step."""
        self._session.observe(seconds)

    def observe_way(self, seconds: float) -> None:
        """Count the way to a forward and back."""
        self._round_trip.observe(seconds)

    def observe_round(self, way_s: float, overhead_s: float, course: RoundCourse) -> None:
        """Count a round that is not streamed: `way_s` beside its forward until the answer, and the rest of it."""
        # What a plain round has beside its forward is measured in plain rounds, as soon as there was one.
        if course == "plain" and not self._has_plain_gap:
            self._has_plain_gap, self._overhead, self._round_trip = True, RunningMedian(0.0), RunningMedian(0.0)
        if course == "plain" or not self._has_plain_gap:
            self._round_trip.observe(max(way_s, 0.0))
            self._overhead.observe(overhead_s)
        elif course == "tree":
            self._tree.observe(way_s + overhead_s - self.gap_s)
        else:
            self._behind_tree.observe(way_s + overhead_s - self.gap_s)

    def counts_forward(self, course: RoundCourse) -> bool:
        """Return whether the forward of a round tells what its rows take; right behind a tree it does not."""
        return course != "behind tree" or not self._has_plain_gap
