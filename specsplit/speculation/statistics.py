"""Knowledge that sessions share: times of the workers, acceptance, corrected rates, and the decision of `auto`.

Shared by the sessions that pick tokens alike (greedily or sampled). Knows no connection and no round's course.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from specsplit.core.types import Timings
from specsplit.speculation.acceptance import Acceptance, DepthProfile
from specsplit.speculation.constants import (
    DECIDE_EVERY,
    FIRST_HIT_RATE,
    HIT_RATE_MEMORY,
    MAX_REST,
    PROFILE_BRANCHING,
    PROFILE_DEPTH,
    SWITCH_PATIENCE,
)
from specsplit.speculation.cost_model import (
    PLAIN,
    Costs,
    Decision,
    Limits,
    Profile,
    RoundMode,
    choose_plan,
    round_s,
)
from specsplit.speculation.lookup import LookupTree
from specsplit.speculation.rates import LookupShare, LookupYield, ProbeAllowance, RatePredictor
from specsplit.speculation.step_times import StepTimes
from specsplit.speculation.token_tree import SpeculationTree
from specsplit.speculation.worker_times import DecodingSessions, WorkerTimes

_BEGUN = Decision(PLAIN, 0, 0, 0.0)
_NO_TREES = Profile(accept_by_depth=(0.0,))
_DRAFTED: tuple[RoundMode, ...] = ("pingpong", "overlap", "stream")


_DecisionKey = tuple[bool, tuple[RoundMode, ...], Limits]
"""Whether there is a draft, the modes on offer and the limits: sessions that differ in them decide apart."""


class _Learned:
    """Corrections and decisions made while about the same number of sessions share the target's steps."""

    def __init__(self, predictors: dict[bool, RatePredictor]) -> None:
        self.predictors = predictors
        """With and without a draft."""
        self.decisions: dict[_DecisionKey, Decision] = {}
        self.decided_at: dict[_DecisionKey, int] = {}
        """The round, counted over all sessions, of each decision."""

    def for_other_load(self) -> _Learned:
        """Return what another load begins with: the corrections, and no decision to hold on to."""
        return _Learned({has_draft: predictor.for_other_load() for has_draft, predictor in self.predictors.items()})


class SpeculationStats:
    """Measured times and counted outcomes of rounds; older ones count less, so that they follow a change.

    `is_planning` says whether these statistics serve `auto` or a stream. Those need all of it; other modes need only
    the acceptance, so the rest is not counted for them. Callers check it before they add to `times`. `here` are the
    sessions of this process at the target.
    """

    def __init__(self, *, is_planning: bool = True, here: DecodingSessions | None = None) -> None:
        self.is_planning = is_planning
        self.times = WorkerTimes(here)
        self.acceptance = Acceptance()
        self.probes = ProbeAllowance()
        self.lookup_yield = LookupYield()
        self._profile = DepthProfile(PROFILE_DEPTH, PROFILE_BRANCHING)
        self._hit_rate = FIRST_HIT_RATE
        self._lookup_share = LookupShare()
        self._learned = _Learned(
            {has_draft: RatePredictor(self._lookup_share, has_draft=has_draft) for has_draft in (False, True)}
        )
        self._learned_by_load = {1: self._learned}
        """Keys are the bits of the number of sessions at the target, whether they share its steps or not."""
        self.num_rounds = 0  # of all sessions
        self.counts_plain = True
        """Whether a plain round that ends now is counted: of sessions that share steps, as many as one alone has."""

    def observe_tree(self, tree: SpeculationTree, token_ids: Sequence[int]) -> None:
        """Count what committed tokens say of the tree that they go through or past."""
        # Committed tokens decide nodes that nobody verified, too: under coupled picks the target's pick there is known.
        judged, cells = tree.nodes.tested(token_ids), tree.cells
        self.acceptance.observe([(cells[node], is_right) for node, is_right in judged])
        if tree.drafted.count and self.is_planning:
            self._learned.predictors[True].hope.num_seen += 1
            # What lookup knows and the draft does not says nothing of a tree that the draft is asked for.
            ranks = tree.drafted_ranks()
            own = {node: is_right for node, is_right in judged if node in ranks}
            self._profile.observe_tree(tree.nodes.parents, ranks, [node for node in own if own[node]], own)

    def observe_propose(self, timings: Timings, wall_s: float | None) -> None:
        """Count a propose that was answered, in `wall_s` seconds, or None if it was a probe."""
        if self.is_planning:
            self.times.observe_propose(timings, wall_s)
            if wall_s is None:
                self.probes.spend((timings.device_ms + timings.sampling_ms) / 1e3)

    def observe_ahead(self, *, is_hit: bool) -> None:
        """Count a round that was drafted ahead: whether its outcome was in the tree."""
        self._hit_rate += (is_hit - self._hit_rate) * (1 - HIT_RATE_MEMORY)

    def observe_round(
        self, decision: Decision, mode: RoundMode, num_tokens: int, began_s: float, ended_s: float, num_rounds: int = 1
    ) -> None:
        """Count a round run by `decision`, in its mode or as lookup's; the others of its `num_rounds` rest."""
        is_counted = self.counts_plain or mode != PLAIN or decision.nodes > 0
        self.num_rounds += num_rounds
        num_sessions = self.times.sessions.value
        # Sessions that share steps take turns; the stride has no common divisor with their number.
        self.counts_plain = num_sessions == 1 or num_rounds > 1 or self.num_rounds % (num_sessions + 1) == 0
        if not is_counted:
            return
        seconds = ended_s - began_s
        if decision.has_draft and not decision.nodes:
            self.probes.earn(began_s - (num_rounds - 1) * seconds, ended_s, num_sessions)
        # A round that was predicted for another load says nothing of the prediction.
        is_comparable = decision.load.bit_length() == self.times.sessions.load.bit_length()
        if is_comparable and mode in (decision.mode, "lookup") and num_tokens and seconds > 0:
            predicted_s = num_tokens / decision.predicted_tokens_per_s
            predictor, is_own = self._learned.predictors[decision.has_draft], mode == decision.mode
            predictor.observe_round(decision.rated_mode, predicted_s, seconds, is_own=is_own)

    def observe_lookup(self, found: LookupTree, token_ids: Sequence[int]) -> None:
        """Count what a plain round with lookup's nodes would have gained here, whatever was run."""
        times, verify = self.times, self.times.verify
        if not self.is_planning or verify is None:
            return
        if not found.cells:
            self._lookup_share.observe(1, 0, 0.0)
            return
        acceptance, cells = self._lookup_share.acceptance, found.cells
        paths = found.path_log_probs(acceptance.log_probs)
        acceptance.observe([(cells[node], is_right) for node, is_right in found.nodes.tested(token_ids)])
        ranked, num_sessions = sorted(paths, reverse=True), times.sessions.value
        beside_s = times.gap_s + times.sessions_s
        plain = 1 / (verify.curve(num_sessions)[num_sessions] + beside_s)
        count = self.count_worth_verifying(ranked, plain)
        if self.predict_tokens_per_s(ranked[:count]) <= plain:
            self._lookup_share.observe(1, 0, 0.0)
            return
        # The nodes that would be verified are those at least as likely as the last one worth its row.
        chosen = {node for node, path in enumerate(paths) if path >= ranked[count - 1]}
        num_right, rows = found.num_spelled(token_ids, chosen), count + num_sessions
        num_taken = min(num_right + 1, len(token_ids))
        taken_s = (verify.curve(rows)[rows] + beside_s + times.tree_s) * num_taken / (num_right + 1)
        self._lookup_share.observe(0, num_taken, taken_s)

    def decide(self, modes: tuple[RoundMode, ...], limits: Limits, *, has_draft: bool) -> Decision | None:
        """Decide anew among plain decoding and `modes`; None while no verify was measured.

        Without a draft a mode's trees are empty, so `modes` are those that gain something all the same.
        """
        times = self.times
        if times.verify is None:
            return None
        self._follow_load()
        learned, key = self._learned, (has_draft, modes, limits)
        # Several sessions begin plainly, which shows what they cost each other: a trial in vain costs all of them.
        last = learned.decisions.get(key, _BEGUN if times.sessions.load > 1 else None)
        current = last.rated_mode if last is not None else None
        predictor = learned.predictors[has_draft]
        costs = _costs(times, times.verify, self._hit_rate, has_draft=has_draft)
        predictor.begin_decision(current, is_contended=has_draft and times.is_contended)
        profiles = self._profiles(modes, costs, has_draft=has_draft)
        decision = choose_plan(profiles, costs, limits, last, partial(predictor.predict, current))
        without_lookup = max(
            predictor.predict_without_lookup(decision.rated_mode, decision.predicted_tokens_per_s),
            1 / round_s(PLAIN, 0, 0, costs),
        )
        predictor.decided(current, decision.rated_mode)
        learned.decisions[key] = decision = replace(
            decision,
            without_lookup=without_lookup,
            has_draft=has_draft,
            num_sessions=costs.num_sessions,
            load=times.sessions.load,
        )
        learned.decided_at[key] = self.num_rounds
        return decision

    def appraise(self, modes: tuple[RoundMode, ...], limits: Limits) -> Decision | None:
        """Return what would be decided with a draft, if nothing stood yet; what was decided and learned stays."""
        last = self.last_decision(modes, limits, has_draft=True)
        if last is None or self.times.verify is None:
            return None
        costs = _costs(self.times, self.times.verify, self._hit_rate, has_draft=True)
        correct = partial(self._learned.predictors[True].predict, last.rated_mode)
        return choose_plan(self._profiles(modes, costs, has_draft=True), costs, limits, None, correct)

    def _follow_load(self) -> None:
        """Go on with what was learned under about the present load; a new load begins with what the last one knew."""
        num_bits = self.times.sessions.load.bit_length()
        learned = self._learned_by_load.get(num_bits)
        if learned is None:
            learned = self._learned_by_load[num_bits] = self._learned.for_other_load()
        self._learned = learned

    def _profiles(self, modes: Sequence[RoundMode], costs: Costs, *, has_draft: bool) -> dict[RoundMode, Profile]:
        """Return the acceptance that each mode is planned with; a draft that was never asked has none."""
        if not has_draft:
            return dict.fromkeys(modes, _NO_TREES)
        if costs.draft is None or not self.times.num_proposals:
            return {}
        drafted = self._profile.profile
        return {mode: drafted for mode in _DRAFTED if mode in modes}

    def last_decision(self, modes: tuple[RoundMode, ...], limits: Limits, *, has_draft: bool) -> Decision | None:
        """Return what was decided last at the present load among plain decoding and `modes`."""
        self._follow_load()
        return self._learned.decisions.get((has_draft, modes, limits))

    def is_decision_due(self, modes: tuple[RoundMode, ...], limits: Limits, *, has_draft: bool) -> bool:
        """Return whether a session whose turn it is decides: of those that share steps, one in as many rounds does.

        A mode that is new to all of them is looked at as often as one session alone would: if it does not pay, each of
        its rounds costs all who wait for its step.
        """
        key, learned = (has_draft, modes, limits), self._learned
        decision, num_others = learned.decisions.get(key), self.times.sessions.value - 1
        if decision is not None and decision.nodes and learned.predictors[has_draft].num_stayed <= SWITCH_PATIENCE:
            num_others = min(num_others, 1)
        return self.num_rounds - learned.decided_at.get(key, 0) >= DECIDE_EVERY * num_others

    @property
    def turn_rounds(self) -> int:
        """Rounds from one to the next in which a session that decodes plainly does not leave speculation alone.

        Such a turn takes time of all that share its steps.
        """
        num_sessions = self.times.sessions.value
        return DECIDE_EVERY * min(num_sessions, MAX_REST) if self.lookup_yield.may_rest(num_sessions) else 1

    def count_worth_verifying(self, path_log_probs: Sequence[float], tokens_per_s: float) -> int:
        """Return how many of a tree's nodes, the likeliest first, are worth their rows at this rate of a session."""
        verify, num_sessions = self.times.verify, self.times.sessions.value
        if verify is None:
            return len(path_log_probs)
        # A further row makes all wait that share the step.
        return verify.count_worth_verifying(path_log_probs, num_sessions * tokens_per_s, num_sessions)

    def predict_tokens_per_s(self, path_log_probs: Sequence[float], num_forks: int = 0) -> float:
        """Return the tokens per second of verifying these nodes at once: the mean over the sessions of the step."""
        times, num_nodes, num_sessions = self.times, len(path_log_probs), self.times.sessions.value
        if times.verify is None:
            return 0.0
        expected = 1 + sum(map(math.exp, path_log_probs)) / num_sessions
        tree_s, rows = (times.tree_s if num_nodes else 0.0) + num_forks * times.verify.fork_s, num_nodes + num_sessions
        return expected / (times.verify.curve(rows)[rows] + times.sessions_s + times.gap_s + tree_s)


def _costs(times: WorkerTimes, verify: StepTimes, hit_rate: float, *, has_draft: bool) -> Costs:
    return Costs(
        verify,
        times.draft,
        times.gap_s,
        hit_rate,
        verify_concurrent=times.verify_concurrent if has_draft else None,
        tree_s=times.tree_s,
        num_sessions=times.sessions.value,
        sessions_s=times.sessions_s,
    )
