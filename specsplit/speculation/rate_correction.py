"""What comes of the rates that the cost model promises, which knows neither a link's moods nor what lookup finds.

Knows no worker and no round; an `SpeculationStats` shares one among all its sessions.
"""

from __future__ import annotations

from specsplit.speculation.cost_model import PLAIN, RoundMode

_LEARNED = 0.04
"""What a round counts against those before it: a good text and a bad one are told apart within some dozens."""
_FORGIVEN = 0.01
"""What a decision for another mode gives back."""
_LEAST, _MOST = 0.3, 16.0
_LONGEST = 10.0
"""Times its promise that a round counts at most: one that a machine or a link stalls says nothing of the mode."""


class RateCorrection:
    """Which part of a rate came: the seconds that were promised for the tokens that came, over those they took.

    So a slow round counts by its length.
    """

    def __init__(self, believed: float = 1.0) -> None:
        self._believed = believed
        self._promised_s = self._taken_s = 0.0

    def observe(self, promised_s: float, taken_s: float) -> None:
        """Count a round, of which both times are positive."""
        if not self._promised_s:
            self._promised_s, self._taken_s = promised_s, promised_s / self._believed
        self._promised_s += _LEARNED * (promised_s - self._promised_s)
        self._taken_s += _LEARNED * (min(taken_s, _LONGEST * promised_s) - self._taken_s)

    def forgive(self) -> None:
        """Believe the promise itself a little more again."""
        self._taken_s += _FORGIVEN * (self._promised_s - self._taken_s)

    @property
    def value(self) -> float:
        """What is to be expected of the next promise, 1 if all of it."""
        if not self._promised_s:
            return self._believed
        return min(max(self._promised_s / self._taken_s, _LEAST), _MOST)


class RateCorrections:
    """What was kept, by mode.

    Modes with a draft are promised much by the same counts, so one that was never tried is believed no more than the
    one among them that kept least.
    """

    def __init__(self) -> None:
        self._kept: dict[RoundMode, RateCorrection] = {}

    def observe(self, mode: RoundMode, promised_s: float, taken_s: float) -> None:
        """Count a round, of which both times are positive."""
        if mode not in self._kept:
            self._kept[mode] = RateCorrection(self._untried(mode))
        self._kept[mode].observe(promised_s, taken_s)

    def forgive(self, tried: RoundMode | None) -> None:
        """Believe the modes other than the one that is being tried a little more again."""
        for mode, kept in self._kept.items():
            if mode != tried:
                kept.forgive()

    def kept(self, mode: RoundMode) -> float:
        """Return which part of a promised rate is to be expected."""
        return self._kept[mode].value if mode in self._kept else self._untried(mode)

    def is_tried(self, mode: RoundMode) -> bool:
        """Return whether rounds of this mode were counted."""
        return mode in self._kept

    def _untried(self, mode: RoundMode) -> float:
        drafted = [kept.value for tried, kept in self._kept.items() if tried != PLAIN]
        return 1.0 if mode == PLAIN else min([1.0, *drafted])


class LookupShare:
    """How much of a text lookup takes over, and how quickly; by round, an older one counting less."""

    def __init__(self) -> None:
        self._alone = self._taken = self._taken_s = 0.0

    def observe(self, num_alone: int, num_taken: int, taken_s: float) -> None:
        """Count a round: its tokens that lookup has no part in, and those that it takes over in `taken_s`."""
        self._alone += _LEARNED * (num_alone - self._alone)
        self._taken += _LEARNED * (num_taken - self._taken)
        self._taken_s += _LEARNED * (taken_s - self._taken_s)

    def tokens_per_s(self, alone: float) -> float:
        """Return what comes of a mode that has `alone` tokens per second where lookup finds nothing."""
        if not self._taken_s:
            return alone
        return max(alone, (self._alone + self._taken) / (self._alone / alone + self._taken_s))
