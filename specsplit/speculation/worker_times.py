"""Times of the workers' steps and of the ways to them, as measured at the start and corrected by every round.

A forward counts with the sampling of its rows, which a step cannot go without. Seconds throughout. Knows no mode.
"""

from __future__ import annotations

import math
from typing import Literal

from specsplit.core.types import Identity, Timings
from specsplit.speculation.constants import (
    CONTENDED,
    CONTENDED_ROWS,
    DISTURBED,
    LONG_TEXT,
    MAX_STEPS_AWAY,
    MEDIAN_WINDOW,
    MIN_OBSERVED,
    ROW_COST,
    ROW_GRID,
    STALE,
    STEPS_AWAY_SLACK,
)
from specsplit.speculation.step_times import (
    PlainTimes,
    RunningMedian,
    StepTimes,
    doubted,
    forwards_s,
    rows_s,
    step_rows,
    step_sessions,
)

RoundCourse = Literal["plain", "tree", "behind tree"]
"""A round without nodes, one with nodes, and one without nodes right behind one with nodes."""


class DraftTimes:
    """Seconds of one propose: a fixed part per call, the way to the draft and back included, and its levels."""

    def __init__(self, level: StepTimes, call_s: float = 0.0) -> None:
        self.level = StepTimes(level.grid, has_plain=False)
        self._call, self._least_call_s = RunningMedian(call_s), math.inf

    @property
    def call_s(self) -> float:
        return self._call.value

    def seconds(self, num_levels: int, rows: float) -> float:
        """Return the seconds until a tree of this many levels, each of `rows` rows, is here."""
        return self.call_s + num_levels * self.level.seconds(rows) if num_levels else 0.0

    def observe(self, num_levels: int, rows: float, device_s: float, wall_s: float | None) -> None:
        """Count a propose: `device_s` in its levels' forwards, `wall_s` as its caller saw it, None if nobody did."""
        if num_levels > 0:
            self.level.observe(rows, device_s / num_levels, is_rare=wall_s is None)
            if wall_s is not None:
                self._least_call_s = min(self._least_call_s, max(wall_s - device_s, 0.0))
                self._call.observe(max(wall_s - device_s, 0.0))
            elif self._least_call_s < self._call.value:
                # A draft that was left has probes alone, for which nobody waits: forgotten, so that it is tried again.
                self._call = RunningMedian(self._least_call_s)


class DecodingSessions:
    """How many sessions of this process are behind their prompts, at one target, and how many are not yet."""

    __slots__ = ("count", "num_beginning")

    def __init__(self) -> None:
        self.count = 0
        self.num_beginning = 0


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
    def begin_together(self) -> bool:
        """Whether several are not behind their prompts yet, so that the load of their rounds is not known."""
        return self._here.num_beginning > 1

    @property
    def load(self) -> int:
        """Sessions at the target, those whose rounds meet in none of its steps too."""
        return max(self._here.count, 1) + self._others.value

    @property
    def value(self) -> int:
        return max(round(self._share.value * max(self._here.count, 1)), 1) + self._others.value


class OverheadTimes:
    """Seconds beside the forwards, of one session alone or of several that share its steps."""

    __slots__ = (
        "_behind_tree",
        "_has_plain_gap",
        "_least_behind_s",
        "_least_tree_s",
        "_num_plain",
        "_num_trees",
        "_overhead",
        "_round_trip",
        "_session",
        "_tree",
        "_tree_gap",
    )

    def __init__(self, round_trip_s: float = 0.0, overhead_s: float = 0.0) -> None:
        self._round_trip, self._overhead = RunningMedian(round_trip_s), RunningMedian(overhead_s)
        self._has_plain_gap, self._tree_gap, self._session = False, RunningMedian(math.inf), RunningMedian(0.0)
        self._tree, self._behind_tree = doubted(0.0), doubted(0.0)
        self._least_tree_s = self._least_behind_s = math.inf
        """The least that nodes cost a round, and the one behind it, over as many as the medians are of."""
        self._num_trees = self._num_plain = 0
        """Rounds with nodes, and plain rounds since the last of them."""

    def for_several(self) -> OverheadTimes:
        """Return what rounds of several sessions begin with."""
        begun = OverheadTimes(self.round_trip_s, self._overhead.value)
        begun._tree, begun._behind_tree = doubted(self._tree.value), doubted(self._behind_tree.value)
        begun._least_tree_s, begun._least_behind_s = self._least_tree_s, self._least_behind_s
        return begun

    @property
    def round_trip_s(self) -> float:
        return self._round_trip.value

    @property
    def gap_s(self) -> float:
        """Seconds between two forwards in a round without a draft: the round trip and the orchestrator's own.

        Rounds with nodes have no less of it, so one that was long once is not believed for ever where none is plain.
        """
        return min(self._round_trip.value + self._overhead.value, self._tree_gap.value)

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

    def observe_round(self, way_s: float, overhead_s: float, course: RoundCourse) -> None:
        """Count a round that is not streamed: `way_s` beside its forward until the answer, and the rest of it."""
        # What a plain round has beside its forward is measured in plain rounds, as soon as there was one.
        if course == "plain" and not self._has_plain_gap:
            self._has_plain_gap, self._overhead, self._round_trip = True, RunningMedian(0.0), RunningMedian(0.0)
        if course == "plain" or not self._has_plain_gap:
            self._round_trip.observe(max(way_s, 0.0))
            self._overhead.observe(overhead_s)
            self._tree_gap = RunningMedian(math.inf)
            self._num_plain += course == "plain"
            if self._num_plain == STALE:
                self._forget_disturbance()
        elif course == "tree":
            self._num_trees, self._num_plain = self._num_trees + 1, 0
            self._tree_gap.observe(max(way_s, 0.0) + overhead_s)
            self._tree.observe(way_s + overhead_s - self.gap_s)
            if self._num_trees >= MEDIAN_WINDOW:
                self._least_tree_s = min(self._least_tree_s, max(self._tree.value, 0.0))
                self._least_behind_s = min(self._least_behind_s, max(self._behind_tree.value, 0.0))
        else:
            self._behind_tree.observe(way_s + overhead_s - self.gap_s)

    def _forget_disturbance(self) -> None:
        """Let nodes cost what they once did, if it was much less: the last rounds that had any were long ago."""
        least_s = self._least_tree_s + self._least_behind_s
        if DISTURBED * least_s < self._tree.value + self._behind_tree.value:
            self._tree, self._behind_tree = doubted(self._least_tree_s), doubted(self._least_behind_s)

    def counts_forward(self, course: RoundCourse) -> bool:
        """Return whether the forward of a round tells what its rows take; right behind a tree it does not."""
        return course != "behind tree" or not self._has_plain_gap


class WorkerTimes:
    """Seconds of the target's and the draft's work and of the ways to them.

    What steps of several sessions have beside their rows is kept apart: there each waits for the others.
    """

    def __init__(self, here: DecodingSessions | None = None) -> None:
        self.sessions = StepSessions(here or DecodingSessions())
        self.verify: StepTimes | None = None  # target forwards by rows, of one session alone
        self.verify_concurrent: StepTimes | None = None
        """Target forwards while the draft is at work: on one machine they slow each other down."""
        self._num_plain = 0  # forwards of one row that were measured, that of the start among them
        self.num_proposals = 0  # proposes that were answered
        self._draft_alone: DraftTimes | None = None
        self._draft_shared: DraftTimes | None = None
        self.taken_in = RunningMedian(0.0)  # seconds of the draft's device for a token of a long text that it lacks
        self.plain = PlainTimes()
        self.text_s = 0.0  # that a forward of the present round takes for its text beside its rows
        self._alone = OverheadTimes()
        self._shared: OverheadTimes | None = None

    @property
    def has_seen_plain(self) -> bool:
        """Whether plain decoding can be judged: by the start, or by rounds of its own if the start was too slow."""
        is_doubtful = self.verify is not None and self.verify.is_start_slow
        return self._num_plain > (MIN_OBSERVED if is_doubtful else 0)

    @property
    def draft(self) -> DraftTimes | None:
        """The draft's times while about as many share the target's steps; None while nothing is known."""
        if self.sessions.load == 1:
            return self._draft_alone
        if self._draft_shared is None and self._draft_alone is not None:
            self._draft_shared = DraftTimes(self._draft_alone.level, self._draft_alone.call_s)
        return self._draft_shared

    @property
    def gap_s(self) -> float:
        """Seconds between two forwards in a round without a draft: the round trip and the orchestrator's own."""
        return self._overhead(self.sessions.value).gap_s

    @property
    def sessions_s(self) -> float:
        """Seconds that a long text, and the other sessions of a step, add to it beside their rows."""
        num_sessions = self.sessions.value
        return self.text_s + (num_sessions - 1) * self._overhead(num_sessions).session_s

    @property
    def tree_s(self) -> float:
        """Seconds that having nodes at all costs, beside their rows: in a round, and in a plain one behind it."""
        num_sessions, verify = self.sessions.value, self.verify
        return self._overhead(num_sessions).tree_s(verify.seconds(num_sessions)) if verify is not None else 0.0

    def adopt(self, target: Identity, draft: Identity | None) -> None:
        """Begin with what the workers measured themselves, unless more is known already."""
        if self.verify is None and target.step_times:
            self.verify, self.plain.fork_s = StepTimes.from_start(target.step_times, target.fork_s), target.fork_s
            self.plain.branches_read_text = target.device == "cpu" and not target.branches_share_text
            if target.step_times[0][0] == 1:
                self._num_plain += 1
                self.plain.start_s, self.plain.text_token_s = target.step_times[0][1], target.text_token_s
        if self._draft_alone is None and draft is not None and draft.step_times:
            self._draft_alone = DraftTimes(StepTimes.from_start(draft.step_times))

    def behind(self, length: int, timings: Timings | None = None) -> None:
        """Reckon with so long a text from now on, if it is alone at the target; `timings` are of a round behind it."""
        if timings is not None and self.plain.observe(timings, length) and (seen := self.verify) is not None:
            # Until now the text counted for the rows of trees.
            self.verify = StepTimes(dict(zip(seen.rows, seen.measured, strict=True)), seen.fork_s)
            self.verify_concurrent = None
        token_s = self.plain.token_s(length) if self.sessions.load == 1 else 0.0
        self.text_s, branch_s = length * token_s, self.plain.branch_tokens(length) * token_s
        if self.verify is not None:
            self.verify.fork_s = self.plain.fork_s + branch_s

    def observe_ping(self, wall_s: float) -> None:
        """Take the quickest ping of the target for its round trip, as long as no verify was measured."""
        self._alone.expect_round_trip(wall_s)

    def observe_step(self, timings: Timings, *, is_concurrent: bool, num_forks: int) -> None:
        """Count a step of a stream, which nobody waited for; `is_concurrent` if the draft was at work meanwhile."""
        if step_rows(timings) > 0 and forwards_s(timings) > 0:
            self._observe_forward(timings, is_concurrent=is_concurrent, num_forks=num_forks)

    def observe_round(
        self,
        timings: Timings,
        verify_s: float,
        overhead_s: float,
        course: RoundCourse,
        *,
        is_concurrent: bool,
        num_forks: int = 0,
    ) -> None:
        """Count a round that is not streamed: its verify, and the rest of it outside of waits for the draft."""
        forward_s, num_sessions = forwards_s(timings), step_sessions(timings)
        if step_rows(timings) <= 0 or forward_s <= 0:
            return
        beside = self._overhead(num_sessions)
        if self.verify is None or beside.counts_forward(course):
            self._observe_forward(timings, is_concurrent=is_concurrent, num_forks=num_forks)
        else:  # what the forward behind a tree takes more is part of the tree's costs
            self.sessions.observe(num_sessions)
            forward_s = self.verify.seconds(step_rows(timings)) + self.text_s + (num_sessions - 1) * beside.session_s
        beside.observe_round(verify_s - forward_s, max(overhead_s, 0.0), course)

    def observe_propose(self, timings: Timings, wall_s: float | None) -> None:
        """Count a propose that was answered; `wall_s` is None if nobody waited, so that it says nothing of the call."""
        self.num_proposals += 1
        levels, device_s = timings.num_forwards, forwards_s(timings)
        if levels <= 0 or device_s <= 0:
            return
        rows = max(timings.num_tokens * step_sessions(timings) / levels, 1.0)
        self._draft_alone = self._draft_alone or DraftTimes(StepTimes(dict.fromkeys(ROW_GRID, device_s / levels)))
        draft = self.draft
        assert draft is not None, "there are times of a session alone"
        draft.observe(levels, rows, device_s, wall_s)

    def observe_taken_in(self, num_tokens: int, device_s: float) -> None:
        """Count a propose for which the draft lacked a long text: so long that the tree's levels hardly matter."""
        self.taken_in.observe(device_s / num_tokens)

    def take_in_s(self, num_tokens: int) -> float:
        """Return the seconds of the draft's device for so much text; 0 if nothing is known of it."""
        if self.taken_in.is_observed or (draft := self.draft) is None:
            return num_tokens * self.taken_in.value
        return num_tokens * draft.level.seconds(LONG_TEXT) / LONG_TEXT

    @property
    def is_contended(self) -> bool:
        """Whether draft and target have been seen to slow each other much, as where they share cores."""
        rows, alone, beside, text_s = CONTENDED_ROWS, self.verify, self.verify_concurrent, self.text_s
        return bool(alone and beside and beside.seconds(rows) + text_s > CONTENDED * (alone.seconds(rows) + text_s))

    def count_steps_away(self, nodes: int) -> int:
        """Return how many verifies of so many nodes the target does while a commit and its answer travel."""
        if self.verify is None:
            return 0
        num_sessions = self.sessions.value
        forward_s = self.verify.seconds((nodes + 1) * num_sessions) + self.sessions_s
        return min(math.ceil(self._overhead(num_sessions).round_trip_s / forward_s - STEPS_AWAY_SLACK), MAX_STEPS_AWAY)

    def draft_s(self, nodes: int, depth: int) -> float:
        """Return the seconds that a draft's tree usually takes, its way included; inf if nothing is known of them."""
        draft = self.draft
        return draft.call_s + self.levels_s(nodes, depth) if draft is not None else math.inf

    def levels_s(self, nodes: int, depth: int) -> float:
        """Return the seconds that the draft's levels take; inf if nothing is known of them."""
        if (draft := self.draft) is None or not depth:
            return math.inf
        return depth * draft.level.seconds(-(-nodes // depth) * self.sessions.value)

    def probe_s(self, nodes: int, depth: int) -> float:
        """Return the seconds to have put aside for a probe: the draft's for its tree, a plain forward's at most.

        A draft that is believed slow would else not be asked for a hundred times that long, though it may have measured
        its times beside other work; what a probe takes is counted once it is known.
        """
        if (draft := self.draft) is None or not depth:
            return 0.0
        drafting_s = depth * draft.level.seconds(-(-nodes // depth))
        return min(drafting_s, self.verify.seconds(1)) if self.verify is not None else drafting_s

    def _observe_forward(self, timings: Timings, *, is_concurrent: bool, num_forks: int = 0) -> None:
        rows, forward_s, num_sessions = step_rows(timings), forwards_s(timings), step_sessions(timings)
        self._num_plain += timings.num_tokens == 1
        self.sessions.observe(num_sessions)
        if self.verify is None:
            self.verify = StepTimes.from_one_row(forward_s / (1 + ROW_COST * (rows - 1)))
        curve = self.verify
        if is_concurrent:
            curve = self.verify_concurrent = self.verify_concurrent or StepTimes(self.verify.grid, self.verify.fork_s)
        if not curve.covers(rows):
            return
        # What the text and the forks take is no part of the rows'; other sessions are taken to have as many forks.
        forward_s -= min(self.text_s + num_forks * (self.verify.fork_s - self.plain.fork_s), 0.9 * forward_s)
        if num_forks:
            forward_s = rows_s(forward_s, num_forks * num_sessions * self.plain.fork_s)
        more_s = forward_s - curve.seconds(rows) if num_sessions > 1 else 0.0
        if more_s > 0:
            self._overhead(num_sessions).observe_session(more_s / (num_sessions - 1))
        else:  # one session alone, or several that took less: so many rows of one would take no more
            curve.observe(rows, forward_s)

    def _overhead(self, num_sessions: int) -> OverheadTimes:
        """Return what steps of so many sessions have beside their rows; several begin with what one alone has shown."""
        # Several whose rounds meet in no step wait for each other all the same.
        if num_sessions == 1 and self.sessions.load == 1:
            return self._alone
        if self._shared is None:
            self._shared = self._alone.for_several()
        return self._shared
