"""Sessions without work, in the order in which they may lose their slots, and those that may not.

Knows of a session only when it was used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

ABANDONED_S = 0.5
"""A session whose client has vanished is not evicted within this time: the client may come on another connection."""


class Idle(Protocol):
    """A session that waits for its client."""

    last_used_s: float


S = TypeVar("S", bound=Idle)


class IdleSessions(dict[str, S]):
    """Sessions by key, the least recently used first. Those that lost their client may be in here, or at work still."""

    def __init__(self, grace_s: float, now: Callable[[], float]) -> None:
        super().__init__()
        self.abandoned_s: dict[str, float] = {}
        """When each session lost its client, the longest ago first; one that is used again leaves."""
        self._grace_s, self._now = grace_s, now

    def evictable(self) -> list[S]:
        """Return the sessions that may give their slots to others: first those that lost their clients, then others."""
        found = filter(self.is_evictable, self)
        return [self[key] for key in sorted(found, key=lambda key: self.abandoned_s.get(key, math.inf))]

    def forget(self, key: str) -> None:
        """Let a session go, idle or not."""
        self.pop(key, None)
        self.abandoned_s.pop(key, None)

    def is_evictable(self, key: str) -> bool:
        """Whether a session may give its slot to another one; any thread may ask."""
        # A client that paused within the grace time comes back to its session.
        session, now_s = self.get(key), self._now()
        abandoned_s = self.abandoned_s.get(key, now_s)
        is_abandoned = abandoned_s <= now_s - min(ABANDONED_S, self._grace_s)
        return session is not None and (is_abandoned or session.last_used_s <= now_s - self._grace_s)

    @property
    def may_have_evictable(self) -> bool:
        """Whether there is such a session, for a thread that is not the executor: in doubt there is."""
        try:
            return any(map(self.is_evictable, self))
        except RuntimeError:  # the executor changed what was being looked through
            return True


class Pins(dict[str, int]):
    """Sessions with an open stream, by epoch; they neither expire nor are evicted. Only the event loop changes them."""

    def add(self, key: str, epoch: int) -> None:
        """Keep a session's slot, if it has or gets one, until `remove`."""
        self[key] = max(epoch, self.get(key, epoch))

    def is_held_by(self, key: str, epoch: int) -> bool:
        """Whether no stream of a later epoch has taken the session over."""
        return self.get(key) == epoch

    def remove(self, key: str) -> None:
        """Release a pin; `SessionTable.set_aside` on the executor follows."""
        del self[key]
