"""Deficit round robin: callers take turns at the rows of steps, so that nobody's number of requests counts.

M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin", 1995. Knows neither rows nor callers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class DeficitRoundRobin:
    """Shares what there is room for among callers that want more than that.

    A turn is `quantum`, and goes on in the next call if there was no room for all of it. While two callers want
    something without a break, what they have got differs by less than two turns.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._turns: deque[str] = deque()
        """Callers that want something; the first one has the turn."""
        self._deficits: dict[str, int] = {}
        """The part of each one's turn that is still to come; 0 where the next turn is a new one."""

    def share(self, wanted: Mapping[str, int], room: int) -> dict[str, int]:
        """Return how much of what it wants each caller gets, all of them `room` at most."""
        if sum(wanted.values()) <= room:
            self._turns.clear()
            self._deficits.clear()
            return dict(wanted)
        # Rows can be cut anywhere, so a turn is used up to the last of them and no deficit is carried over a turn.
        left = {caller: count for caller, count in wanted.items() if count > 0}
        self._admit(left)
        shares = dict.fromkeys(wanted, 0)
        while room > 0 and left:
            caller = self._turns[0]
            deficit = self._deficits[caller] or self._quantum
            count = min(left.get(caller, 0), deficit, room)
            shares[caller] += count
            room -= count
            self._deficits[caller] = deficit - count
            if left.get(caller, 0) <= count:  # nothing more is wanted, and nobody saves a turn for later
                left.pop(caller, None)
                self._deficits[caller] = 0
            else:
                left[caller] -= count
            if not self._deficits[caller]:
                self._turns.rotate(-1)
        return shares

    def _admit(self, wanting: Mapping[str, int]) -> None:
        """Forget those who want nothing any more, and put newcomers behind all others."""
        self._turns = deque(caller for caller in self._turns if caller in wanting)
        known = set(self._turns)
        self._turns.extend(caller for caller in wanting if caller not in known)
        self._deficits = {caller: self._deficits.get(caller, 0) for caller in self._turns}
