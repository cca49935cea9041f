"""What an orchestrator has learned of its workers and of its sources' guesses, and the choice that follows from it.

Shared by the sessions that pick tokens alike (greedily or sampled). Knows no worker and no link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from specsplit.core.types import Identity, Timings
from specsplit.speculation.acceptance import Acceptance, DepthProfile, lookup_cell
from specsplit.speculation.cost_model import Costs, Decision, Limits, Profile, RoundMode, choose, count_worth_verifying
from specsplit.speculation.lookup import LookupTree
from specsplit.speculation.rate_correction import LookupShare, RateCorrections
from specsplit.speculation.step_times import DraftTimes, RunningMedian, StepTimes
from specsplit.speculation.token_tree import TokenTree

MAX_DEPTH, MAX_BRANCHING = 16, 4
MAX_STEPS_AWAY = 6
_GRID = (1, 2, 3, 5, 9, 17, 33)
_ROW_COST = 0.04
"""Before anything else is known: what a further row adds to a forward of one. Ten to twenty rows double it on a CPU."""
_HIT_MEMORY = 0.97
_FAR = 0.25
"""Of a forward: what has to lie between two of them for a stream to gain something without a draft, since lookup's
nodes come to it a step late."""
_NO_TREES = Profile(accept_by_depth=(0.0,))
_DRAFTED: tuple[RoundMode, ...] = ("pingpong", "overlap", "stream")


class SpeculationStats:
    """Measured times and counted guesses; older ones count less, so that it follows a change.

    What only a choice or a stream goes by is counted if it `plans`.
    """

    def __init__(self, *, plans: bool = True) -> None:
        self._plans = plans
        self.acceptance = Acceptance()
        self.verify: StepTimes | None = None
        """By rows of a target's forward."""
        self.has_seen_plain = False
        """Whether a forward of one row was measured."""
        self.num_proposals = 0
        """Proposes that were answered."""
        self._decisions: dict[tuple[bool, tuple[RoundMode, ...]], Decision] = {}
        """By the modes that were offered, with or without a draft: a session whose draft is away chooses for itself."""
        self._verify_beside: StepTimes | None = None
        """The same while the draft is at work: on one machine they slow each other down."""
        self._draft: DraftTimes | None = None
        self._round_trip = RunningMedian()
        self._has_round_trip = False
        self._least_ping_s = math.inf
        self._own = RunningMedian()
        self._hit_rate = 0.5
        self._promises = {has_draft: RateCorrections() for has_draft in (False, True)}
        """Of all rounds under a choice, by whether there was a draft."""
        self._alone = {has_draft: RateCorrections() for has_draft in (False, True)}
        """Of those that lookup did not take over."""
        self._stretches = LookupShare()
        self._drafted = DepthProfile(MAX_DEPTH, MAX_BRANCHING)

    def meet(self, target: Identity, draft: Identity | None) -> None:
        """Take over what workers measured themselves, unless more is known already."""
        if self.verify is None and target.step_times:
            self.verify = StepTimes(dict(target.step_times))
            self.has_seen_plain = target.step_times[0][0] == 1
        if self._draft is None and draft is not None and draft.step_times:
            self._draft = DraftTimes(StepTimes(dict(draft.step_times)))

    def observe_verify(self, timings: Timings, wall_s: float | None, *, is_concurrent: bool = False) -> None:
        """Count a verify of a round after the prompt's; `is_concurrent` tells that the draft was at work meanwhile.

        `wall_s` is None for a step of a stream, which nobody waited for.
        """
        rows, device_s = timings.num_tokens, timings.device_ms / 1e3
        if rows <= 0 or device_s <= 0 or not self._plans:
            return
        if self.verify is None:
            per_row = device_s / (1 + _ROW_COST * (rows - 1))
            self.verify = StepTimes({point: per_row * (1 + _ROW_COST * (point - 1)) for point in _GRID})
        if is_concurrent:
            if self._verify_beside is None:
                self._verify_beside = StepTimes(self.verify.grid)
            self._verify_beside.observe(rows, device_s)
        else:
            self.verify.observe(rows, device_s)
        self.has_seen_plain |= rows == 1
        if wall_s is not None:
            self._has_round_trip = True
            self._round_trip.observe(max(wall_s - device_s, 0.0))

    def observe_ping(self, wall_s: float) -> None:
        """Count a ping of the target, which tells its round trip while nothing else does."""
        if not self._has_round_trip:  # the first one may have had a connection to make
            self._least_ping_s = min(wall_s, self._least_ping_s)
            self._round_trip = RunningMedian(self._least_ping_s)

    def steps_away(self, nodes: int) -> int:
        """Return how many verifies of so many nodes the target does while a commit and its answer travel."""
        if self.verify is None:
            return 0
        return min(math.ceil(self._round_trip.value / self.verify.seconds(nodes + 1) - 0.1), MAX_STEPS_AWAY)

    def draft_s(self, nodes: int, depth: int) -> float:
        """Return the seconds in which the draft grows a tree of so many nodes, evenly over its levels."""
        return depth * self._draft.level.seconds(-(-nodes // depth)) if self._draft is not None and depth else 0.0

    def observe_propose(self, timings: Timings, wall_s: float | None) -> None:
        """Count a propose that was answered, after `wall_s` where that says what a call takes."""
        self.num_proposals += 1
        levels, device_s = timings.num_forwards, timings.device_ms / 1e3
        if levels <= 0 or device_s <= 0 or not self._plans:
            return
        rows = max(timings.num_tokens / levels, 1.0)
        if self._draft is None:
            self._draft = DraftTimes(StepTimes(dict.fromkeys(_GRID, device_s / levels)))
        self._draft.observe(levels, rows, device_s, wall_s)

    def observe_overhead(self, own_s: float) -> None:
        """Count what a round took beside its verify and waiting for the draft."""
        if self._plans:
            self._own.observe(max(own_s, 0.0))

    def observe_tree(self, tree: TokenTree, token_ids: Sequence[int]) -> None:
        """Count what committed tokens say of the tree that they go through or past."""
        decided = list(tree.tested(token_ids))
        for node, is_right in decided:
            self.acceptance.observe(tree.cells[node], is_accepted=is_right)
        if tree.num_drafted and self._plans:
            accepted = [node for node, is_right in decided if is_right]
            self._drafted.observe_tree(tree.parents, tree.sibling_ranks(), accepted, [node for node, _ in decided])

    def observe_ahead(self, *, is_hit: bool) -> None:
        """Count a round that was drafted ahead: whether its outcome was in the tree."""
        self._hit_rate += (is_hit - self._hit_rate) * (1 - _HIT_MEMORY)

    def observe_round(self, decision: Decision, mode: RoundMode, num_tokens: int, seconds: float) -> None:
        """Count a round that was run by `decision`, in its mode or as lookup's: its tokens and its time."""
        if mode in (decision.mode, "lookup") and num_tokens and seconds > 0:
            promised_s = num_tokens / decision.predicted_tokens_per_s
            self._promises[decision.has_draft].observe(decision.mode, promised_s, seconds)
            if mode == decision.mode:
                self._alone[decision.has_draft].observe(mode, promised_s, seconds)

    def observe_lookup(self, found: LookupTree, token_ids: Sequence[int]) -> None:
        """Count what a round of plain decoding would have made of lookup's nodes here, whatever was done."""
        if not self._plans or self.verify is None:
            return
        paths: list[float] = []
        for parent, *seen in zip(found.parents, found.match_lengths, found.depths, found.ranks, strict=True):
            above = paths[parent] if parent >= 0 else 0.0
            paths.append(above + self.acceptance.estimate(lookup_cell(*seen)))
        ranked = sorted(paths, reverse=True)
        count = count_worth_verifying(ranked, self._plain_rate, self.verify)
        if not count:
            self._stretches.observe(1, 0, 0.0)
            return
        num_right = found.num_spelled(token_ids, [node for node, path in enumerate(paths) if path >= ranked[count - 1]])
        num_taken = min(num_right + 1, len(token_ids))
        taken_s = (self.verify.seconds(count + 1) + self._other_s) * num_taken / (num_right + 1)
        self._stretches.observe(0, num_taken, taken_s)

    def decide(self, modes: Sequence[RoundMode], limits: Limits, *, has_draft: bool) -> Decision | None:
        """Choose anew among plain decoding and `modes`; None while no verify was measured.

        Without a draft a mode's trees are empty, so `modes` are those that gain something all the same.
        """
        if self.verify is None:
            return None
        offered = has_draft, tuple(modes)
        last = self._decisions.get(offered)
        current = last.mode if last is not None else None
        promises, alone = self._promises[has_draft], self._alone[has_draft]
        promises.forgive(current)
        alone.forgive(current)

        def expected(mode: RoundMode, predicted_tokens_per_s: float) -> float:
            # What the present mode makes of this text is known. A stream's rounds are not taken over by lookup: one
            # that has nothing but lookup's nodes is tried where they would gain it what they gain the others.
            kept = predicted_tokens_per_s * promises.kept(mode)
            if mode == "stream" and (has_draft or promises.is_tried(mode)):
                return kept
            with_lookup = self._stretches.tokens_per_s(predicted_tokens_per_s * alone.kept(mode))
            if mode != current:
                return with_lookup
            return kept if has_draft else max(kept, with_lookup)  # it may have been left for long

        beside = self._verify_beside if has_draft else None
        costs = Costs(self.verify, self._draft, self._other_s, self._hit_rate, verify_beside=beside)
        profiles = self._profiles(modes, has_draft=has_draft)
        decision = choose(profiles, costs, limits, last, expect=expected)
        alone_rate = max(decision.predicted_tokens_per_s * alone.kept(decision.mode), self._plain_rate)
        self._decisions[offered] = decision = replace(decision, without_lookup=alone_rate, has_draft=has_draft)
        return decision

    def _profiles(self, modes: Sequence[RoundMode], *, has_draft: bool) -> dict[RoundMode, Profile]:
        """Return what each mode's trees are to be planned by; a draft that was never asked is none to plan with."""
        assert self.verify is not None, "asked once there is one"
        if not has_draft:
            is_far = self._other_s > _FAR * self.verify.seconds(1)
            return dict.fromkeys(modes, _NO_TREES) if is_far else {}
        is_known = self._draft is not None and self.num_proposals > 0
        drafted = self._drafted.profile
        return {mode: drafted for mode in _DRAFTED if mode in modes and is_known}

    def last_decision(self, modes: Sequence[RoundMode], *, has_draft: bool) -> Decision | None:
        """Return what was decided last among plain decoding and `modes`, with or without a draft."""
        return self._decisions.get((has_draft, tuple(modes)))

    @property
    def _plain_rate(self) -> float:
        assert self.verify is not None, "asked once there is one"
        return 1 / (self.verify.seconds(1) + self._other_s)

    def count_worth_verifying(self, path_log_probs: Sequence[float], tokens_per_s: float) -> int:
        """Return how many of a tree's nodes, the likeliest first, are worth their rows at this rate."""
        if self.verify is None:
            return len(path_log_probs)
        return count_worth_verifying(path_log_probs, tokens_per_s, self.verify)

    def predict_tokens_per_s(self, path_log_probs: Sequence[float]) -> float:
        """Return the tokens per second of verifying these nodes at once."""
        if self.verify is None:
            return 0.0
        expected = 1 + sum(map(math.exp, path_log_probs))
        return expected / (self.verify.seconds(len(path_log_probs) + 1) + self._other_s)

    @property
    def _other_s(self) -> float:
        return self._round_trip.value + self._own.value
