"""Knowledge that sessions share: times of the workers, acceptance, corrected rates, and the decision of `auto`.

Shared by the sessions that pick tokens alike (greedily or sampled). Knows no connection and no round's course.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from specsplit.core.types import Identity, Timings
from specsplit.speculation.acceptance import Acceptance, DepthProfile
from specsplit.speculation.constants import (
    DRAFTLESS_STREAM_GAP,
    FIRST_HIT_RATE,
    HIT_RATE_MEMORY,
    MAX_STEPS_AWAY,
    PROFILE_BRANCHING,
    PROFILE_DEPTH,
    ROW_COST,
    ROW_GRID,
    STEPS_AWAY_SLACK,
)
from specsplit.speculation.cost_model import (
    Costs,
    Decision,
    Limits,
    Profile,
    RoundMode,
    choose_plan,
    count_worth_verifying,
)
from specsplit.speculation.lookup import LookupTree
from specsplit.speculation.rate_correction import LookupShare, RatePredictor
from specsplit.speculation.step_times import DraftTimes, RunningMedian, StepTimes
from specsplit.speculation.token_tree import SpeculationTree

_NO_TREES = Profile(accept_by_depth=(0.0,))
_DRAFTED: tuple[RoundMode, ...] = ("pingpong", "overlap", "stream")


class WorkerTimes:
    """Seconds of the target's and the draft's work and of the ways to them.

    Fixed modes have no use for most of them, so they are counted only if it `observes`.
    """

    def __init__(self, *, observes: bool = True) -> None:
        self._observes = observes
        self.verify: StepTimes | None = None
        """Target forwards by rows."""
        self.verify_concurrent: StepTimes | None = None
        """Target forwards while the draft is at work: on one machine they slow each other down."""
        self.has_seen_plain = False
        """Whether a forward of one row was measured."""
        self.draft: DraftTimes | None = None
        self.num_proposals = 0
        """Proposes that were answered."""
        self._round_trip = RunningMedian()
        self._has_round_trip = False
        self._least_ping_s = math.inf
        self._overhead = RunningMedian()

    @property
    def gap_s(self) -> float:
        """Seconds between two target forwards in a round without a draft: the round trip and the orchestrator's own."""
        return self._round_trip.value + self._overhead.value

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
        rows, device_s = timings.num_tokens, timings.device_ms / 1e3
        if rows <= 0 or device_s <= 0 or not self._observes:
            return
        if self.verify is None:
            one_row_s = device_s / (1 + ROW_COST * (rows - 1))
            self.verify = StepTimes({point: one_row_s * (1 + ROW_COST * (point - 1)) for point in ROW_GRID})
        if is_concurrent:
            if self.verify_concurrent is None:
                self.verify_concurrent = StepTimes(self.verify.grid)
            self.verify_concurrent.observe(rows, device_s)
        else:
            self.verify.observe(rows, device_s)
        self.has_seen_plain |= rows == 1
        if wall_s is not None:
            self._has_round_trip = True
            self._round_trip.observe(max(wall_s - device_s, 0.0))

    def observe_ping(self, wall_s: float) -> None:
        """Count a ping of the target: its round trip, as long as no verify was measured."""
        if not self._has_round_trip:  # the least of them, since the first one may have had a connection to make
            self._least_ping_s = min(wall_s, self._least_ping_s)
            self._round_trip = RunningMedian(self._least_ping_s)

    def observe_propose(self, timings: Timings, wall_s: float | None) -> None:
        """Count a propose that was answered; `wall_s` is None if nobody waited, so that it says nothing of the call."""
        self.num_proposals += 1
        levels, device_s = timings.num_forwards, timings.device_ms / 1e3
        if levels <= 0 or device_s <= 0 or not self._observes:
            return
        rows = max(timings.num_tokens / levels, 1.0)
        if self.draft is None:
            self.draft = DraftTimes(StepTimes(dict.fromkeys(ROW_GRID, device_s / levels)))
        self.draft.observe(levels, rows, device_s, wall_s)

    def observe_overhead(self, overhead_s: float) -> None:
        """Count the part of a round outside its verify and outside of waiting for the draft."""
        if self._observes:
            self._overhead.observe(max(overhead_s, 0.0))

    def count_steps_away(self, nodes: int) -> int:
        """Return how many verifies of so many nodes the target does while a commit and its answer travel."""
        if self.verify is None:
            return 0
        forwards = self._round_trip.value / self.verify.seconds(nodes + 1)
        return min(math.ceil(forwards - STEPS_AWAY_SLACK), MAX_STEPS_AWAY)

    def draft_s(self, nodes: int, depth: int) -> float:
        """Return the seconds in which the draft's device grows a tree of so many nodes, evenly over its levels."""
        return depth * self.draft.level.seconds(-(-nodes // depth)) if self.draft is not None and depth else 0.0


class SpeculationStats:
    """Measured times and counted outcomes of rounds; older ones count less, so that they follow a change.

    What only `auto` and a stream go by is counted only if it `plans`.
    """

    def __init__(self, *, plans: bool = True) -> None:
        self._plans = plans
        self.times = WorkerTimes(observes=plans)
        self.acceptance = Acceptance()
        self._profile = DepthProfile(PROFILE_DEPTH, PROFILE_BRANCHING)
        self._hit_rate = FIRST_HIT_RATE
        self._lookup_share = LookupShare()
        self._predictors = {
            has_draft: RatePredictor(self._lookup_share, has_draft=has_draft) for has_draft in (False, True)
        }
        self._decisions: dict[tuple[bool, tuple[RoundMode, ...]], Decision] = {}
        """The last decision by the modes on offer, with or without a draft: sessions without one decide apart."""

    def observe_tree(self, tree: SpeculationTree, token_ids: Sequence[int]) -> None:
        """Count what committed tokens say of the tree that they go through or past."""
        # Committed tokens decide nodes that nobody verified, too: under coupled picks the target's pick there is known.
        judged = tree.tested(token_ids)
        cells = tree.cells
        self.acceptance.observe([(cells[node], is_right) for node, is_right in judged])
        if tree.drafted.count and self._plans:
            accepted = [node for node, is_right in judged if is_right]
            self._profile.observe_tree(tree.nodes.parents, tree.sibling_ranks(), accepted, [node for node, _ in judged])

    def observe_ahead(self, *, is_hit: bool) -> None:
        """Count a round that was drafted ahead: whether its outcome was in the tree."""
        self._hit_rate += (is_hit - self._hit_rate) * (1 - HIT_RATE_MEMORY)

    def observe_round(self, decision: Decision, mode: RoundMode, num_tokens: int, seconds: float) -> None:
        """Count a round that was run by `decision`, in its mode or as lookup's: its tokens and its time."""
        if mode in (decision.mode, "lookup") and num_tokens and seconds > 0:
            predicted_s = num_tokens / decision.predicted_tokens_per_s
            self._predictors[decision.has_draft].observe_round(decision.mode, mode, predicted_s, seconds)

    def observe_lookup(self, found: LookupTree, token_ids: Sequence[int]) -> None:
        """Count what a round of plain decoding would have made of lookup's nodes here, whatever was done."""
        verify = self.times.verify
        if not self._plans or verify is None:
            return
        log_probs = self.acceptance.log_probs
        paths: list[float] = []
        for parent, cell in zip(found.nodes.parents, found.cells, strict=True):
            paths.append((paths[parent] if parent >= 0 else 0.0) + log_probs[cell])
        ranked, gap_s = sorted(paths, reverse=True), self.times.gap_s
        count = count_worth_verifying(ranked, 1 / (verify.curve(1)[1] + gap_s), verify)
        if not count:
            self._lookup_share.observe(1, 0, 0.0)
            return
        # The nodes that would be verified are those at least as likely as the last one worth its row.
        chosen = {node for node, path in enumerate(paths) if path >= ranked[count - 1]}
        num_right = found.num_spelled(token_ids, chosen)
        num_taken = min(num_right + 1, len(token_ids))
        taken_s = (verify.curve(count + 1)[count + 1] + gap_s) * num_taken / (num_right + 1)
        self._lookup_share.observe(0, num_taken, taken_s)

    def decide(self, modes: tuple[RoundMode, ...], limits: Limits, *, has_draft: bool) -> Decision | None:
        """Decide anew among plain decoding and `modes`; None while no verify was measured.

        Without a draft a mode's trees are empty, so `modes` are those that gain something all the same.
        """
        times = self.times
        if times.verify is None:
            return None
        last = self._decisions.get((has_draft, modes))
        current = last.mode if last is not None else None
        predictor, gap_s = self._predictors[has_draft], times.gap_s
        predictor.forgive(current)
        concurrent = times.verify_concurrent if has_draft else None
        costs = Costs(times.verify, times.draft, gap_s, self._hit_rate, verify_concurrent=concurrent)
        profiles = self._profiles(modes, costs, has_draft=has_draft)
        decision = choose_plan(profiles, costs, limits, last, partial(predictor.predict, current))
        without_lookup = max(
            predictor.predict_without_lookup(decision.mode, decision.predicted_tokens_per_s),
            1 / (times.verify.seconds(1) + gap_s),
        )
        self._decisions[has_draft, modes] = decision = replace(
            decision, without_lookup=without_lookup, has_draft=has_draft
        )
        return decision

    def _profiles(self, modes: Sequence[RoundMode], costs: Costs, *, has_draft: bool) -> dict[RoundMode, Profile]:
        """Return the acceptance that each mode is planned with; a draft that was never asked has none."""
        if not has_draft:
            is_far = costs.round_trip_s > DRAFTLESS_STREAM_GAP * costs.verify.seconds(1)
            return dict.fromkeys(modes, _NO_TREES) if is_far else {}
        if costs.draft is None or not self.times.num_proposals:
            return {}
        drafted = self._profile.profile
        return {mode: drafted for mode in _DRAFTED if mode in modes}

    def last_decision(self, modes: tuple[RoundMode, ...], *, has_draft: bool) -> Decision | None:
        """Return what was decided last among plain decoding and `modes`, with or without a draft."""
        return self._decisions.get((has_draft, modes))

    def count_worth_verifying(self, path_log_probs: Sequence[float], tokens_per_s: float) -> int:
        """Return how many of a tree's nodes, the likeliest first, are worth their rows at this rate."""
        verify = self.times.verify
        if verify is None:
            return len(path_log_probs)
        return count_worth_verifying(path_log_probs, tokens_per_s, verify)

    def predict_tokens_per_s(self, path_log_probs: Sequence[float]) -> float:
        """Return the tokens per second of verifying these nodes at once."""
        times, rows = self.times, len(path_log_probs) + 1
        if times.verify is None:
            return 0.0
        expected = 1 + sum(map(math.exp, path_log_probs))
        return expected / (times.verify.curve(rows)[rows] + times.gap_s)
