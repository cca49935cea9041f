"""What comes of the rates that the cost model promises: it knows neither a link's moods nor how guesses hang together.

Knows no worker and no round; an `Experience` shares one among all its sessions.
"""

from __future__ import annotations

from collections.abc import Mapping

from specsplit.core.cost_model import Mode

_LEARNED = 0.04
"""What a round counts against those before it: a good text and a bad one are told apart within some dozens."""
_FORGIVEN = 0.01
"""What a decision for another mode gives back."""
_LEAST, _MOST = 0.5, 1.5
_DRAFTLESS: tuple[Mode, ...] = ("plain", "lookup")


class Promises:
    """By mode, the seconds that the model gave the tokens that came, and the seconds that they took.

    Their ratio counts a slow round by its length. Modes with a draft are promised much by the same counts, so one that
    was never tried is believed no more than the one among them that kept least.
    """

    def __init__(self) -> None:
        self._promised_s: dict[Mode, float] = {}
        self._taken_s: dict[Mode, float] = {}

    def observe(self, mode: Mode, promised_s: float, taken_s: float) -> None:
        """Count a round, or several at once, of which both times are positive."""
        if mode not in self._promised_s:
            self._promised_s[mode], self._taken_s[mode] = promised_s, promised_s / self._untried(mode)
        self._promised_s[mode] += _LEARNED * (promised_s - self._promised_s[mode])
        self._taken_s[mode] += _LEARNED * (taken_s - self._taken_s[mode])

    def forgive(self, tried: Mode | None) -> None:
        """Believe the modes other than the one that is being tried a little more again."""
        for mode, promised_s in self._promised_s.items():
            if mode != tried:
                self._taken_s[mode] += _FORGIVEN * (promised_s - self._taken_s[mode])

    def kept(self, mode: Mode) -> float:
        """Return which part of a promised rate is to be expected."""
        if mode not in self._promised_s:
            return self._untried(mode)
        return min(max(self._promised_s[mode] / self._taken_s[mode], _LEAST), _MOST)

    def _untried(self, mode: Mode) -> float:
        if mode in _DRAFTLESS:
            return 1.0
        return min([1.0, *[self.kept(tried) for tried in self._promised_s if tried not in _DRAFTLESS]])

    def of(self, modes: tuple[Mode, ...]) -> Mapping[Mode, float]:
        """Return `kept` of each mode."""
        return {mode: self.kept(mode) for mode in modes}
