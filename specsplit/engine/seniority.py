"""The order in which sessions keep their rows when memory is short: the earlier opened and the more urgent the longer.

    [ the oldest, which nobody drives out | ... | the youngest, which goes first ]    the same order as in the queue

A session that was preempted keeps its place, and comes back when another one has ended. Only the executor writes here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from specsplit.core.record import record
from specsplit.engine.admission import aged


@record
class Rank:
    """A session's place: when it was opened first, earlier by AGE_S for each level of priority."""

    place_s: float
    number: int
    opened_s: float

    def __lt__(self, other: Rank) -> bool:
        """Whether this session is the older one."""
        return (self.place_s, self.number) < (other.place_s, other.number)


@record
class _Preempted:
    """A session that lost its rows, whose it is, how many had ended by then, and when its client was there last."""

    rank: Rank
    caller: str
    num_ended: int
    seen_s: float


class Seniority:
    """Ranks of the open sessions, and of those that were preempted and have not come back."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.num_preempted = 0
        """Sessions so far that lost their rows to others."""
        self._now, self._num_opened, self._num_ended = now, 0, 0
        self._ranks: dict[str, Rank] = {}
        self._preempted: dict[str, _Preempted] = {}

    def open(self, key: str, priority: int) -> None:
        """Give a session its place: a new one the last within its priority, one that was preempted its old one."""
        before = self._preempted.pop(key, None)
        self._num_opened += 1
        opened_s = self._now()
        self._ranks[key] = before.rank if before else Rank(aged(opened_s, priority), self._num_opened, opened_s)

    def of(self, key: str) -> Rank:
        """Return the rank of an open session."""
        return self._ranks[key]

    def preempt(self, key: str, caller: str = "") -> None:
        """Let a session of a caller go, which comes back."""
        self.num_preempted += 1
        self._preempted[key] = _Preempted(self._ranks.pop(key), caller, self._num_ended, self._now())

    def end(self, key: str) -> None:
        """Let an open session go, if there is one; it would come back as a new one."""
        if self._ranks.pop(key, None) is not None:
            self._num_ended += 1

    def forget(self, key: str) -> None:
        """Let a preempted session, if there is one, lose its place."""
        self._preempted.pop(key, None)

    def preempted_since(self, key: str) -> float | None:
        """Return when a session was opened that has been preempted since, None for any other; any thread may ask."""
        preempted = self._preempted.get(key)
        return preempted.rank.opened_s if preempted is not None else None

    def preempted_of(self, caller: str) -> set[str]:
        """Return the sessions of a caller that were preempted and have not come back; any thread may ask."""
        return {key for key, preempted in list(self._preempted.items()) if preempted.caller == caller}

    def may_return(self, key: str) -> bool:
        """Whether a session may be opened: a preempted one only after another one has ended, or if it is alone.

        Otherwise it would be let in with what is left of its own rows, and lose them again to the next token.
        """
        preempted = self._preempted.get(key)
        return preempted is None or not self._ranks or preempted.num_ended < self._num_ended

    def sweep(self, expired_s: float, waiting: Collection[str] = ()) -> None:
        """Forget preempted sessions whose clients were there before `expired_s` last; those of `waiting` are there."""
        for key, preempted in list(self._preempted.items()):
            if key in waiting:
                self._preempted[key] = replace(preempted, seen_s=self._now())
            elif preempted.seen_s <= expired_s:
                del self._preempted[key]
