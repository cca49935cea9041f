"""Limits of one caller: things at once, and tokens per second by a bucket. Knows neither calls nor models."""

from __future__ import annotations

import time
from collections.abc import Callable

from specsplit.core.record import record
from specsplit.core.sections import TargetSettings, WorkerSettings

BURST_S = 10.0
"""Seconds of its rate that a caller may use at once after a rest."""
_MOST_FULL = 1024
"""Callers without debts that are remembered before they are looked through."""


@record
class CallerLimits:
    """The limits of one caller at one worker; None is no limit."""

    sessions: int | None = None
    streams: int | None = None
    tokens_per_s: float | None = None

    @classmethod
    def of(cls, settings: WorkerSettings) -> CallerLimits:
        """Return the limits that a worker's settings name."""
        streams = settings.caller_streams if isinstance(settings, TargetSettings) else None
        return cls(settings.caller_sessions, streams, settings.caller_tokens_per_second)


class TokenRate:
    """A token bucket for each caller. Work may begin while a bucket is not overdrawn, and then overdraws it.

    So no prompt is too long for a bucket; the caller only waits longer before its next work.
    """

    def __init__(self, per_s: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        """Tokens per second of one caller; None for any number."""
        self._now = now
        self._full_s: dict[str, float] = {}
        """When the bucket of each caller is full again, which says how full it is now."""

    def wait_s(self, caller: str) -> float:
        """Return the seconds until the caller may begin something, 0 if it may now."""
        return max(0.0, self._full_s.get(caller, 0.0) - self._now() - BURST_S) if self.per_s is not None else 0.0

    def take(self, caller: str, num_tokens: int) -> None:
        """Take tokens out of the caller's bucket; a negative number gives some back."""
        if self.per_s is None:
            return
        now_s = self._now()
        if caller not in self._full_s and len(self._full_s) >= _MOST_FULL:
            self._full_s = {each: full_s for each, full_s in self._full_s.items() if full_s > now_s}
        self._full_s[caller] = max(now_s, self._full_s.get(caller, now_s)) + num_tokens / self.per_s
