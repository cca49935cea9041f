"""How long a step waits for sessions that are about to come back, so that it serves them, too.

    session   [ in a step | away: its answer travels, its next round is drawn up and travels | in a step | ...

Without waiting, the first of many sessions that comes back has a step alone, the others the next one, and each waits
for two. Plain arithmetic over moments of one clock; knows no tensors, and only the executor touches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

LATEST = 2.0
"""Deviations from the mean time away after which a session is not waited for any more. Chosen, as in TCP's timer."""
LEARNING = 0.25
"""Weight of one time away in their mean and deviation. Chosen: a reader whose pace changes is known after four."""
FORGOTTEN_S = 60.0
"""Seconds after which a session that has not come back is forgotten."""
Seconds = Callable[[int], float]


class _Away:
    """Times that one session was away."""

    __slots__ = ("deviation_s", "left_s", "mean_s")

    def __init__(self, left_s: float) -> None:
        self.left_s: float | None = left_s
        """When it was answered; None if it is back."""
        self.mean_s = math.inf
        self.deviation_s = 0.0

    def came(self, at_s: float) -> None:
        if self.left_s is None:
            return
        away_s = at_s - self.left_s
        if self.mean_s == math.inf:
            self.mean_s, self.deviation_s = away_s, away_s / 2
        else:
            self.deviation_s += LEARNING * (abs(away_s - self.mean_s) - self.deviation_s)
            self.mean_s += LEARNING * (away_s - self.mean_s)
        self.left_s = None


class Company:
    """Sessions that are away, and when each is expected back."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Away] = {}
        """The one that was answered last comes last."""
        self._last_left_s = -math.inf

    def left(self, session: str, at_s: float) -> None:
        """Count that a session was answered."""
        self._last_left_s = at_s
        known = self._sessions.pop(session, None) or _Away(at_s)
        known.left_s = at_s
        self._sessions[session] = known
        self._forget_lost(at_s)

    def _forget_lost(self, now_s: float) -> None:
        """Forget those that have not come back for long, the first ones: a session that was evicted never ends."""
        while True:
            session, away = next(iter(self._sessions.items()))
            if away.left_s is None or now_s - away.left_s <= FORGOTTEN_S:
                return
            del self._sessions[session]

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_complete(self) -> bool:
        """Whether nobody is away."""
        return all(away.left_s is None for away in self._sessions.values())

    def came(self, session: str, at_s: float) -> None:
        """Count that a session's next round is here."""
        known = self._sessions.get(session)
        if known is not None:
            known.came(at_s)

    def forget(self, session: str) -> None:
        """Expect a session no more, since it has ended."""
        self._sessions.pop(session, None)

    def wait_s(self, joint_s: Seconds, apart_s: Seconds, now_s: float) -> float:
        """Return the seconds for which it pays to wait, 0 for none: the device saves more than it idles meanwhile.

        `joint_s(n)` is the seconds of a step of the sessions that are ready and n more, `apart_s(n)` that of n alone.
        """
        alone_s = joint_s(0)
        # What it has idled since the last step counts, too: sessions that keep to two steps in turn leave no idle time.
        idle_s = now_s - self._last_left_s
        idle_s = idle_s if idle_s < alone_s else 0.0
        wait_s = 0.0
        for count, due_s in enumerate(self._due_s(now_s, alone_s), 1):
            if alone_s + apart_s(count) - joint_s(count) > idle_s + due_s:
                wait_s = due_s
        return wait_s

    def num_expected(self, now_s: float, within_s: float) -> int:
        """Return how many sessions are expected back in less than `within_s`."""
        return len(self._due_s(now_s, within_s))

    def _due_s(self, now_s: float, within_s: float) -> list[float]:
        """Return in how many seconds, less than `within_s`, sessions are expected back, the first one first."""
        due: list[float] = []
        for away in self._sessions.values():
            if away.left_s is None:
                continue
            left_s = away.left_s + away.mean_s + LATEST * away.deviation_s - now_s
            if 0 < left_s < within_s:
                due.append(left_s)
        return sorted(due)
