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
    DRAFTLESS_STREAM_GAP,
    FIRST_HIT_RATE,
    FORGIVENESS,
    HIT_RATE_MEMORY,
    LOOKUP_RETRY,
    LOOKUP_YIELD,
    LOOKUP_YIELD_STEP,
    MAX_RATE_FACTOR,
    MAX_STALL,
    MIN_RATE_FACTOR,
    PROBE_SHARE,
    PROFILE_BRANCHING,
    PROFILE_DEPTH,
    RATE_STEP,
)
from specsplit.speculation.cost_model import (
    PLAIN,
    Costs,
    Decision,
    Limits,
    Profile,
    RoundMode,
    choose_plan,
)
from specsplit.speculation.lookup import LookupTree
from specsplit.speculation.step_times import WorkerTimes
from specsplit.speculation.token_tree import SpeculationTree

_NO_TREES = Profile(accept_by_depth=(0.0,))
_DRAFTED: tuple[RoundMode, ...] = ("pingpong", "overlap", "stream")


class RateCorrection:
    """Measured over predicted tokens per second of one mode, as a ratio of seconds: predicted over taken.

    A ratio of means, not a mean of ratios: a slow round counts by its length.
    """

    def __init__(self, initial: float = 1.0) -> None:
        self._initial = initial
        self._predicted_s = self._taken_s = 0.0

    def observe(self, predicted_s: float, taken_s: float) -> None:
        """Count a round; both times are positive."""
        if not self._predicted_s:
            # Both means begin with this round's length, so that the factor begins at its initial value.
            self._predicted_s, self._taken_s = predicted_s, predicted_s / self._initial
        self._predicted_s += RATE_STEP * (predicted_s - self._predicted_s)
        self._taken_s += RATE_STEP * (min(taken_s, MAX_STALL * predicted_s) - self._taken_s)

    def forgive(self) -> None:
        """Move a little back towards the model's own prediction."""
        self._taken_s += FORGIVENESS * (self._predicted_s - self._taken_s)

    @property
    def factor(self) -> float:
        """The factor on the next prediction."""
        if not self._predicted_s:
            return self._initial
        return min(max(self._predicted_s / self._taken_s, MIN_RATE_FACTOR), MAX_RATE_FACTOR)


class RateCorrections:
    """The corrections by mode.

    Predictions of all modes with a draft rest on the same acceptance counts. So a mode that was never tried begins
    with the smallest factor of those that were, and never above 1.
    """

    def __init__(self) -> None:
        self._by_mode: dict[RoundMode, RateCorrection] = {}

    def observe(self, mode: RoundMode, predicted_s: float, taken_s: float) -> None:
        """Count a round of `mode`; both times are positive."""
        correction = self._by_mode.get(mode)
        if correction is None:
            correction = self._by_mode[mode] = RateCorrection(self._untried(mode))
        correction.observe(predicted_s, taken_s)

    def forgive(self, current: RoundMode | None) -> None:
        """Forgive all modes but the current one, so that what was left is tried again in time."""
        for mode, correction in self._by_mode.items():
            if mode != current:
                correction.forgive()

    def factor(self, mode: RoundMode) -> float:
        """Return the factor on a predicted rate of `mode`."""
        correction = self._by_mode.get(mode)
        return correction.factor if correction is not None else self._untried(mode)

    def is_tried(self, mode: RoundMode) -> bool:
        """Return whether rounds of this mode were counted."""
        return mode in self._by_mode

    def _untried(self, mode: RoundMode) -> float:
        drafted = [correction.factor for tried, correction in self._by_mode.items() if tried != PLAIN]
        return 1.0 if mode == PLAIN else min([1.0, *drafted])


class LookupShare:
    """The share of a text that lookup takes over, and how quickly; means over rounds, an older one counts less."""

    def __init__(self) -> None:
        self._num_alone = self._num_taken = self._taken_s = 0.0

    def observe(self, num_alone: int, num_taken: int, taken_s: float) -> None:
        """Count a round: its tokens without lookup, and those that lookup takes over in `taken_s`."""
        self._num_alone += RATE_STEP * (num_alone - self._num_alone)
        self._num_taken += RATE_STEP * (num_taken - self._num_taken)
        self._taken_s += RATE_STEP * (taken_s - self._taken_s)

    def tokens_per_s(self, alone: float) -> float:
        """Return the rate of a mode that has `alone` tokens per second where lookup finds nothing."""
        if not self._taken_s:
            return alone
        # Tokens over seconds, of the rounds that lookup takes over and of the others.
        return max(alone, (self._num_alone + self._num_taken) / (self._num_alone / alone + self._taken_s))


class LookupYield:
    """The tokens that a lookup in a plain round brings, by the longest n-gram that had occurred before.

    Where they are few (its trees do not fit the text, or the target cuts them since many sessions share it), few rounds
    look up, and the others cost what plain decoding does.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[int, float] = {}
        """Accepted nodes of a lookup, the mean by kind of hit; older lookups count less."""
        self._num_skipped: dict[int, int] = {}

    def is_worth_asking(self, longest_hit: int) -> bool:
        """Return whether to look up in a plain round; a kind of hit that does not pay is tried now and then."""
        if not longest_hit:
            return False
        if self._num_tokens.get(longest_hit, 1.0) >= LOOKUP_YIELD:
            return True
        num_skipped = self._num_skipped.get(longest_hit, 0) + 1
        self._num_skipped[longest_hit] = num_skipped % LOOKUP_RETRY
        return num_skipped == LOOKUP_RETRY

    def observe(self, longest_hit: int, num_accepted: int) -> None:
        """Count a lookup in a plain round: the nodes that were verified and accepted."""
        mean = self._num_tokens.get(longest_hit, 1.0)
        self._num_tokens[longest_hit] = mean + LOOKUP_YIELD_STEP * (num_accepted - mean)


class ProbeAllowance:
    """The seconds that probes of a draft not in use may take: a share of the time without it, less what they took."""

    def __init__(self) -> None:
        self._left_s = 0.0
        self._counted_until_s = -math.inf

    def earn(self, began_s: float, ended_s: float) -> None:
        """Count a round without the draft; of rounds that run at once their common time counts once."""
        self._left_s += PROBE_SHARE * max(0.0, ended_s - max(began_s, self._counted_until_s))
        self._counted_until_s = max(ended_s, self._counted_until_s)

    def spend(self, probe_s: float) -> None:
        """Count a probe, with all the text that the draft had to take in for it."""
        self._left_s -= probe_s

    def pays_for(self, probe_s: float) -> bool:
        """Return whether there is enough for a probe; one that took longer has the next ones wait."""
        return self._left_s >= probe_s


class RatePredictor:
    """Predicts tokens per second of each mode: the cost model's rate, corrected by its rounds, and lookup's share.

    Each mode has two corrections. One is learned from all rounds planned in the mode, those that lookup took over
    included; the other from the rest, and gives the rate that lookup has to beat. Decisions with and without a draft
    have a predictor each, since a mode's rate differs between them; lookup's share is common to both.
    """

    def __init__(self, lookup_share: LookupShare, *, has_draft: bool) -> None:
        self._lookup_share, self._has_draft = lookup_share, has_draft
        self._all_rounds, self._own_rounds = RateCorrections(), RateCorrections()

    def observe_round(self, planned: RoundMode, ran: RoundMode, predicted_s: float, taken_s: float) -> None:
        """Count a round that was planned in one mode and ran in it, or as lookup's; both times are positive."""
        self._all_rounds.observe(planned, predicted_s, taken_s)
        if ran == planned:
            self._own_rounds.observe(planned, predicted_s, taken_s)

    def forgive(self, current: RoundMode | None) -> None:
        """Move the modes other than the current one back towards the model, once a decision."""
        self._all_rounds.forgive(current)
        self._own_rounds.forgive(current)

    def predict(self, current: RoundMode | None, mode: RoundMode, predicted: float) -> float:
        """Return the tokens per second to expect of `mode`, for which the cost model says `predicted`."""
        corrected = predicted * self._all_rounds.factor(mode)
        # Lookup takes over no round of a stream, so a stream is known by its own rounds alone. Without a draft it has
        # nothing but lookup's nodes: one never tried is expected to gain from them what the other modes do.
        if mode == "stream" and (self._has_draft or self._all_rounds.is_tried(mode)):
            return corrected
        with_lookup = self._lookup_share.tokens_per_s(self.predict_without_lookup(mode, predicted))
        if mode != current:
            return with_lookup
        # The current mode's rounds say what it makes of this text; without a draft it may have been left for long.
        return corrected if self._has_draft else max(corrected, with_lookup)

    def predict_without_lookup(self, mode: RoundMode, predicted: float) -> float:
        """Return the same for rounds that lookup does not take over."""
        return predicted * self._own_rounds.factor(mode)


class SpeculationStats:
    """Measured times and counted outcomes of rounds; older ones count less, so that they follow a change.

    `plans` says whether these statistics serve `auto` or a stream. Those need all of it; other modes need only the
    acceptance, so the rest is not counted for them. Callers check `plans` before they add to `times`.
    """

    def __init__(self, *, plans: bool = True) -> None:
        self.plans = plans
        self.times = WorkerTimes()
        self.acceptance = Acceptance()
        self.probes = ProbeAllowance()
        self.lookup_yield = LookupYield()
        self._profile = DepthProfile(PROFILE_DEPTH, PROFILE_BRANCHING)
        self._hit_rate = FIRST_HIT_RATE
        self._lookup_share = LookupShare()
        self._predictors = {
            has_draft: RatePredictor(self._lookup_share, has_draft=has_draft) for has_draft in (False, True)
        }
        self._decisions: dict[tuple[bool, tuple[RoundMode, ...], Limits], Decision] = {}
        """The last decision by the modes on offer, with or without a draft: sessions without one decide apart."""

    def observe_tree(self, tree: SpeculationTree, token_ids: Sequence[int]) -> None:
        """Count what committed tokens say of the tree that they go through or past."""
        # Committed tokens decide nodes that nobody verified, too: under coupled picks the target's pick there is known.
        judged = tree.tested(token_ids)
        cells = tree.cells
        self.acceptance.observe([(cells[node], is_right) for node, is_right in judged])
        if tree.drafted.count and self.plans:
            accepted = [node for node, is_right in judged if is_right]
            self._profile.observe_tree(tree.nodes.parents, tree.sibling_ranks(), accepted, [node for node, _ in judged])

    def observe_propose(self, timings: Timings, wall_s: float | None) -> None:
        """Count a propose that was answered, in `wall_s` seconds, or None if it was a probe."""
        if self.plans:
            self.times.observe_propose(timings, wall_s)
            if wall_s is None:
                self.probes.spend((timings.device_ms + timings.sampling_ms) / 1e3)

    def observe_ahead(self, *, is_hit: bool) -> None:
        """Count a round that was drafted ahead: whether its outcome was in the tree."""
        self._hit_rate += (is_hit - self._hit_rate) * (1 - HIT_RATE_MEMORY)

    def observe_round(
        self, decision: Decision, mode: RoundMode, num_tokens: int, began_s: float, ended_s: float
    ) -> None:
        """Count a round that was run by `decision`, in its mode or as lookup's: its tokens and its time."""
        seconds = ended_s - began_s
        if not decision.nodes:
            self.probes.earn(began_s, ended_s)
        if mode in (decision.mode, "lookup") and num_tokens and seconds > 0:
            predicted_s = num_tokens / decision.predicted_tokens_per_s
            self._predictors[decision.has_draft].observe_round(decision.mode, mode, predicted_s, seconds)

    def observe_lookup(self, found: LookupTree, token_ids: Sequence[int]) -> None:
        """Count what a plain round with lookup's nodes would have gained here, whatever was run."""
        verify = self.times.verify
        if not self.plans or verify is None:
            return
        if not found.cells:
            self._lookup_share.observe(1, 0, 0.0)
            return
        log_probs = self.acceptance.log_probs
        paths: list[float] = []
        for parent, cell in zip(found.nodes.parents, found.cells, strict=True):
            paths.append((paths[parent] if parent >= 0 else 0.0) + log_probs[cell])
        ranked, gap_s = sorted(paths, reverse=True), self.times.gap_s
        plain = 1 / (verify.curve(1)[1] + gap_s)
        count = verify.count_worth_verifying(ranked, plain)
        if self.predict_tokens_per_s(ranked[:count]) <= plain:
            self._lookup_share.observe(1, 0, 0.0)
            return
        # The nodes that would be verified are those at least as likely as the last one worth its row.
        chosen = {node for node, path in enumerate(paths) if path >= ranked[count - 1]}
        num_right = found.num_spelled(token_ids, chosen)
        num_taken = min(num_right + 1, len(token_ids))
        taken_s = (verify.curve(count + 1)[count + 1] + gap_s + self.times.tree_s) * num_taken / (num_right + 1)
        self._lookup_share.observe(0, num_taken, taken_s)

    def decide(self, modes: tuple[RoundMode, ...], limits: Limits, *, has_draft: bool) -> Decision | None:
        """Decide anew among plain decoding and `modes`; None while no verify was measured.

        Without a draft a mode's trees are empty, so `modes` are those that gain something all the same.
        """
        times = self.times
        if times.verify is None:
            return None
        last = self._decisions.get((has_draft, modes, limits))
        current = last.mode if last is not None else None
        predictor, gap_s = self._predictors[has_draft], times.gap_s
        predictor.forgive(current)
        concurrent = times.verify_concurrent if has_draft else None
        costs = Costs(
            times.verify, times.draft, gap_s, self._hit_rate, verify_concurrent=concurrent, tree_s=times.tree_s
        )
        profiles = self._profiles(modes, costs, has_draft=has_draft)
        decision = choose_plan(profiles, costs, limits, last, partial(predictor.predict, current))
        without_lookup = max(
            predictor.predict_without_lookup(decision.mode, decision.predicted_tokens_per_s),
            1 / (times.verify.seconds(1) + gap_s),
        )
        self._decisions[has_draft, modes, limits] = decision = replace(
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

    def last_decision(self, modes: tuple[RoundMode, ...], limits: Limits, *, has_draft: bool) -> Decision | None:
        """Return what was decided last among plain decoding and `modes`, with or without a draft."""
        return self._decisions.get((has_draft, modes, limits))

    def count_worth_verifying(self, path_log_probs: Sequence[float], tokens_per_s: float) -> int:
        """Return how many of a tree's nodes, the likeliest first, are worth their rows at this rate."""
        verify = self.times.verify
        if verify is None:
            return len(path_log_probs)
        return verify.count_worth_verifying(path_log_probs, tokens_per_s)

    def predict_tokens_per_s(self, path_log_probs: Sequence[float]) -> float:
        """Return the tokens per second of verifying these nodes at once."""
        times, rows = self.times, len(path_log_probs) + 1
        if times.verify is None:
            return 0.0
        expected = 1 + sum(map(math.exp, path_log_probs))
        tree_s = times.tree_s if rows > 1 else 0.0
        return expected / (times.verify.curve(rows)[rows] + times.gap_s + tree_s)
