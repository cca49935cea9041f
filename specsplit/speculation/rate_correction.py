"""Corrects predicted by measured tokens per second: the cost model knows neither a link's moods nor what lookup finds.

Knows no worker and no round; the sessions that share a `SpeculationStats` share these.
"""

from __future__ import annotations

from specsplit.speculation.constants import FORGIVENESS, MAX_RATE_FACTOR, MAX_STALL, MIN_RATE_FACTOR, RATE_STEP
from specsplit.speculation.cost_model import PLAIN, RoundMode


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


class RatePredictor:
    """Expected tokens per second of each mode: the model's prediction, what its rounds made of it, and lookup's share.

    Two corrections are kept by mode: over all rounds of a plan, which says what the mode makes of this text, and over
    those that lookup did not take over, which says what lookup has to beat. Decisions with and without a draft have a
    predictor each, since the same mode means something else in each; lookup's share is common to both.
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
        """Return the tokens per second to expect of `mode`, for which the model predicts so many."""
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
        """Return the same for rounds that lookup has nothing for."""
        return predicted * self._own_rounds.factor(mode)
