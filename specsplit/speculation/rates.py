"""Rates that modes are expected to have: the cost model's, corrected by measured rounds, and what lookup takes over.

Also the allowance that probes of an unused draft are paid from. Knows no session and no decision.
"""

from __future__ import annotations

import math
from copy import deepcopy

from specsplit.speculation.acceptance import Acceptance
from specsplit.speculation.constants import (
    EXPLORED_ROUNDS,
    FORGIVENESS,
    HOPE,
    HOPE_MEMORY,
    HOPE_PRIOR,
    HOPE_TREES,
    LEAST_PLAIN_FACTOR,
    LOOKUP_RETRY,
    LOOKUP_YIELD,
    LOOKUP_YIELD_STEP,
    MAX_HALVINGS,
    MAX_RATE_FACTOR,
    MAX_REST,
    MAX_SAVED_PROBES,
    MAX_STALL,
    MIN_RATE_FACTOR,
    PROBE_SHARE,
    RATE_STEP,
    RECOVERY,
    REST_YIELD_STEP,
    TRIAL_DECISIONS,
    USUAL_STEP,
)
from specsplit.speculation.cost_model import CONCURRENT, PLAIN, RatedMode

_WITHOUT_TREES: tuple[RatedMode, ...] = (PLAIN, "bare stream")


class RateCorrection:
    """Measured over predicted tokens per second of one mode, as a ratio of seconds: predicted over taken.

    A ratio of means, not a mean of ratios: a slow round counts by its length.
    """

    def __init__(self, initial: float = 1.0) -> None:
        self.num_failed = 0
        """Trials in a row in which the mode did not pay: each halves what is forgiven."""
        self._initial = initial
        self._predicted_s = self._taken_s = 0.0
        self._usual = initial
        """The mean factor of some hundred rounds: a disturbance that drove the mode out hardly shows in it."""
        self._num_observed = 0

    def observe(self, predicted_s: float, taken_s: float) -> None:
        """Count a round; both times are positive."""
        if not self._predicted_s:
            # Both means begin with this round's length, so that the factor begins at its initial value.
            self._predicted_s, self._taken_s = predicted_s, predicted_s / self._initial
        self._predicted_s += RATE_STEP * (predicted_s - self._predicted_s)
        self._taken_s += RATE_STEP * (min(taken_s, MAX_STALL * predicted_s) - self._taken_s)
        self._num_observed += 1
        self._usual += max(USUAL_STEP, 1 / self._num_observed) * (self.factor - self._usual)

    def forgive(self, factor: float) -> None:
        """Move a little back towards this factor, and quicker as far as the mode was as good for long."""
        halvings = 2 ** min(self.num_failed, MAX_HALVINGS)
        self._taken_s += FORGIVENESS / halvings * (self._predicted_s / factor - self._taken_s)
        usual_s = self._predicted_s / min(self._usual, factor)
        if usual_s < self._taken_s:
            self._taken_s += RECOVERY / halvings * (usual_s - self._taken_s)

    def begin_other_load(self) -> None:
        """Take the model's own prediction where rounds were quicker, and nothing for usual."""
        self._taken_s = max(self._taken_s, self._predicted_s)
        self._usual, self._num_observed = self.factor, 0

    def forgive_down_to(self, factor: float) -> None:
        """Forgive as much as brings the factor up to this one, if it is below."""
        self._taken_s = min(self._taken_s, self._predicted_s / factor)

    @property
    def factor(self) -> float:
        """The factor on the next prediction."""
        if not self._predicted_s:
            return self._initial
        return min(max(self._predicted_s / self._taken_s, MIN_RATE_FACTOR), MAX_RATE_FACTOR)


class RateCorrections:
    """The corrections by mode.

    Predictions of all modes with a draft rest on the same acceptance counts. So a mode that was never tried begins
    with the smallest factor of those that were, and never above 1. Where draft and target share cores, ping-pong does
    not begin with that of concurrent modes, in which they slow each other; nor does any mode with that of a stream
    without nodes, which asks nothing of the draft. What slows plain decoding (prompts of others, a busy machine) slows
    every mode: so plain decoding's counts among them, and none is forgiven beyond it.
    """

    def __init__(self) -> None:
        self.is_contended = False
        """Whether draft and target slow each other: what concurrent modes lack is not expected of ping-pong then."""
        self._by_mode: dict[RatedMode, RateCorrection] = {}

    def observe(self, mode: RatedMode, predicted_s: float, taken_s: float) -> None:
        """Count a round of `mode`; both times are positive."""
        correction = self._by_mode.get(mode)
        if correction is None:
            correction = self._by_mode[mode] = RateCorrection(self._untried(mode))
        correction.observe(predicted_s, taken_s)

    def for_other_load(self) -> RateCorrections:
        """Return what another load begins with, less what made rounds quicker than predicted at this one."""
        other = deepcopy(self)
        for correction in other._by_mode.values():
            correction.begin_other_load()
        return other

    def forgive(self, current: RatedMode | None) -> None:
        """Forgive all modes but the current one, so that what was left is tried again in time."""
        common = self._common
        for mode, correction in self._by_mode.items():
            if mode != current:
                correction.forgive(1.0 if mode == PLAIN else common)

    def leave(self, mode: RatedMode, *, is_failed: bool) -> None:
        """Count that `mode` was left for another, after a trial in vain or after it had paid for long."""
        correction = self._by_mode.get(mode)
        if correction is None:
            return
        correction.num_failed = correction.num_failed + 1 if is_failed else 0
        if mode == PLAIN:
            correction.forgive_down_to(LEAST_PLAIN_FACTOR)

    def factor(self, mode: RatedMode) -> float:
        """Return the factor on a predicted rate of `mode`."""
        correction = self._by_mode.get(mode)
        return correction.factor if correction is not None else self._untried(mode)

    def is_tried(self, mode: RatedMode) -> bool:
        """Return whether rounds of this mode were counted."""
        return mode in self._by_mode

    @property
    def _common(self) -> float:
        """The factor that plain decoding's rounds put on every mode, at most 1."""
        return min(1.0, self.factor(PLAIN))

    def _untried(self, mode: RatedMode) -> float:
        if mode == PLAIN:
            return 1.0
        if mode == "bare stream":
            return self._common
        ignored = ("bare stream", *(CONCURRENT if self.is_contended and mode not in CONCURRENT else ()))
        return min([1.0, *[tried.factor for other, tried in self._by_mode.items() if other not in ignored]])


class LookupShare:
    """The share of a text that lookup takes over, and how quickly; means over rounds, an older one counts less."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        """Counts all that lookup finds, not only what the draft has left it as a tree's own table does."""
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
        self._per_round = 1.0
        """Accepted nodes of a plain round, the mean over those that could look up; older ones count less."""

    def is_worth_asking(self, longest_hit: int, num_rounds: int = 1) -> bool:
        """Return whether to look up in a plain round; a kind of hit that does not pay is tried now and then.

        The round stands for `num_rounds` if the others of as many rest.
        """
        if not longest_hit:
            return False
        if self._num_tokens.get(longest_hit, 1.0) >= LOOKUP_YIELD:
            return True
        num_skipped = self._num_skipped.get(longest_hit, 0) + num_rounds
        is_retried = num_skipped >= LOOKUP_RETRY
        self._num_skipped[longest_hit] = 0 if is_retried else num_skipped
        return is_retried

    def may_rest(self, num_sessions: int) -> bool:
        """Return whether plain rounds bring too little of lookup to be more than plain decoding.

        With several sessions in a step an offered tree costs more: all of them wait for it.
        """
        return self._per_round < (LOOKUP_YIELD if num_sessions > 1 else LOOKUP_YIELD / 2)

    def observe_round(self, num_accepted: int) -> None:
        """Count a plain round that could look up, whether it did or not."""
        self._per_round += REST_YIELD_STEP * (num_accepted - self._per_round)

    def observe(self, longest_hit: int, num_accepted: int) -> None:
        """Count a lookup in a plain round: the nodes that were verified and accepted."""
        mean = self._num_tokens.get(longest_hit, 1.0)
        self._num_tokens[longest_hit] = mean + LOOKUP_YIELD_STEP * (num_accepted - mean)


class Hope:
    """How much better modes with a draft may be than is known: the more, the fewer of their trees were seen lately.

    Plain decoding shows nothing of them, so what few trees have shown would else be believed for ever. While it goes
    on they are forgotten little by little; half as quickly for each trial in vain, one after the other.
    """

    def __init__(self) -> None:
        self.num_seen = HOPE_PRIOR
        """Trees of the draft that were judged; of more than HOPE_TREES none counts."""
        self._num_failed = 0

    @property
    def factor(self) -> float:
        """The factor on their rates; 1 once enough trees were seen, so that a draft that only costs is left."""
        return 1 + HOPE * (1 / math.sqrt(1 + min(self.num_seen, HOPE_TREES)) - 1 / math.sqrt(1 + HOPE_TREES))

    def forget(self) -> None:
        """Count a decision for a mode without trees."""
        memory = HOPE_MEMORY ** (0.5 ** min(self._num_failed, MAX_HALVINGS))
        self.num_seen = memory * min(self.num_seen, HOPE_TREES)

    def leave(self, *, is_failed: bool) -> None:
        """Count that trees were left, after a trial in vain or after they had paid for long."""
        self._num_failed = self._num_failed + 1 if is_failed else 0


class ProbeAllowance:
    """The seconds that probes of a draft not in use may take: a share of the time without it, less what they took.

    Also the rounds with a draft of which nothing is known yet: each of many sessions that begin at once would have it
    take in a prompt of its own.
    """

    def __init__(self) -> None:
        self._num_explored = 0
        self._left_s = 0.0
        self._set_aside_s = 0.0
        """For the probes that are under way."""
        self._counted_until_s = -math.inf

    def explore(self) -> bool:
        """Return whether a round may run with a draft of which nothing is known; of all sessions a few do."""
        self._num_explored += 1
        return self._num_explored <= 2 * EXPLORED_ROUNDS

    def earn(self, began_s: float, ended_s: float, num_sessions: int = 1) -> None:
        """Count rounds without a draft that could be asked; of rounds that run at once their common time counts once.

        Where several sessions share the steps all of them wait for a probe, and each learns from those of the others.
        """
        share = PROBE_SHARE / min(num_sessions, MAX_REST)
        self._left_s += share * max(0.0, ended_s - max(began_s, self._counted_until_s))
        self._counted_until_s = max(ended_s, self._counted_until_s)

    def spend(self, probe_s: float) -> None:
        """Count a probe that was answered, with all the text that the draft had to take in for it."""
        self._left_s += self._set_aside_s - probe_s
        self._set_aside_s = 0.0

    def take(self, probe_s: float) -> bool:
        """Return whether there is enough for a probe, and put that much aside: of many sessions one begins.

        A probe that took longer, for it had text to take in, has the next ones wait. What was saved up beyond a few
        probes is lost, so that no long time without any is paid back at once.
        """
        self._left_s = min(self._left_s, MAX_SAVED_PROBES * probe_s)
        if self._left_s < probe_s:
            return False
        self._left_s -= probe_s
        self._set_aside_s += probe_s
        return True


class RatePredictor:
    """Predicts tokens per second of each mode: the cost model's rate, corrected by its rounds, and lookup's share.

    Each mode has two corrections. One is learned from all rounds planned in the mode, those that lookup took over
    included; the other from the rest, and gives the rate that lookup has to beat. Decisions with and without a draft
    have a predictor each, since a mode's rate differs between them; lookup's share is common to both.
    """

    def __init__(self, lookup_share: LookupShare, *, has_draft: bool) -> None:
        self._lookup_share, self._has_draft, self.hope = lookup_share, has_draft, Hope()
        self._is_hopeful = has_draft
        self._all_rounds, self._own_rounds = RateCorrections(), RateCorrections()
        self.num_stayed = 0
        """Decisions in a row for the present mode."""

    def for_other_load(self) -> RatePredictor:
        """Return one that begins with what this one has learned, and shares lookup's share with it."""
        other = RatePredictor(self._lookup_share, has_draft=self._has_draft)
        other._is_hopeful = False  # a trial in vain costs all sessions that share the steps
        other._all_rounds, other._own_rounds = self._all_rounds.for_other_load(), self._own_rounds.for_other_load()
        return other

    def observe_round(self, mode: RatedMode, predicted_s: float, taken_s: float, *, is_own: bool) -> None:
        """Count a round planned in `mode` that ran in its own way, or else as lookup's; both times are positive."""
        self._all_rounds.observe(mode, predicted_s, taken_s)
        if is_own:
            self._own_rounds.observe(mode, predicted_s, taken_s)

    def begin_decision(self, current: RatedMode | None, *, is_contended: bool) -> None:
        """Move the modes other than the current one back towards the model.

        `is_contended` says that draft and target slow each other when they compute at the same time.
        """
        self._all_rounds.is_contended = self._own_rounds.is_contended = is_contended
        self._all_rounds.forgive(current)
        self._own_rounds.forgive(current)

    def decided(self, current: RatedMode | None, mode: RatedMode) -> None:
        """Count a decision for `mode` after one for `current`; a mode that is soon left again is forgiven less."""
        if mode in _WITHOUT_TREES:
            self.hope.forget()
        if current is None or mode == current:
            self.num_stayed += 1
            return
        is_failed = self.num_stayed < TRIAL_DECISIONS
        for corrections in (self._all_rounds, self._own_rounds):
            corrections.leave(current, is_failed=is_failed)
        if mode in _WITHOUT_TREES and current not in _WITHOUT_TREES:
            self.hope.leave(is_failed=is_failed)
        self.num_stayed = 1

    def predict(self, current: RatedMode | None, mode: RatedMode, predicted: float) -> float:
        """Return the tokens per second to expect of `mode`, for which the cost model says `predicted`."""
        if self._is_hopeful and mode not in _WITHOUT_TREES:
            predicted *= self.hope.factor
        corrected = predicted * self._all_rounds.factor(mode)
        # Lookup takes over no round of a stream, so a stream is known by its own rounds alone. Without a draft it has
        # nothing but lookup's nodes: one never tried is expected to gain from them what the other modes do.
        if mode in ("stream", "bare stream") and (self._has_draft or self._all_rounds.is_tried(mode)):
            return corrected
        with_lookup = self._lookup_share.tokens_per_s(self.predict_without_lookup(mode, predicted))
        if mode != current:
            return with_lookup
        # The current mode's rounds say what it makes of this text; without a draft it may have been left for long.
        return corrected if self._has_draft else max(corrected, with_lookup)

    def predict_without_lookup(self, mode: RatedMode, predicted: float) -> float:
        """Return the same for rounds that lookup does not take over."""
        return predicted * self._own_rounds.factor(mode)
