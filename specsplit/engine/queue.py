"""One session's queue: at most one running task, one pending round and one pending close; duplicates share a task.

Its length is bounded, however many calls of a session arrive. Knows neither models nor slots; event loop only.
"""

from __future__ import annotations

from specsplit.core.errors import DeadlineExceeded, StaleEpoch, StaleRound
from specsplit.engine.batch import Round, Task


class SessionQueue:
    """One session's tasks; `running` is the one that the scheduler has.

    Invariant: every task in here is later than those before it, in the order [running | close | next_round].
    """

    __slots__ = ("close", "next_round", "running")

    def __init__(self, task: Task) -> None:
        self.running = task
        self.next_round: Task | None = None
        """The newest round that has not begun."""
        self.close: Task | None = None
        """The close of the session. It goes before `next_round`: rounds that came before it are void."""

    def add(self, task: Task) -> Task:
        """Give a task its place and return it, or return the equal task that it joins.

        Raises:
            StaleRound, StaleEpoch: a later one is running or waiting.
            InvalidRequest: the same round is running or waiting with another body.
        """
        if task.round is None:
            return self._add_close(task)
        for other in (self.running, self.next_round):
            if other is None or other.round is None or other.is_cancelled:
                continue
            if task.round.is_repeat_of(other.round):
                return other
            if task.round.is_before(other.round):
                raise _stale(task.round, other.round)
        self._supersede_next_round(task.round)
        self.next_round = task
        return task

    def _add_close(self, task: Task) -> Task:
        self._supersede_next_round(None)
        if self.close is not None:
            return self.close
        if self.running.round is None and not self.running.is_cancelled:
            return self.running
        self.close = task
        return task

    def remove(self, task: Task) -> bool:
        """Take back a task that has not begun; return whether it was waiting here."""
        if task is self.next_round:
            self.next_round = None
        elif task is self.close:
            self.close = None
        else:
            return False
        return True

    def advance(self) -> Task | None:
        """Return the task that runs now that the last one has ended, None if none is left."""
        # A round behind the close came after it: it opens the session again.
        following = self.close or self.next_round
        if following is not None:
            self.remove(following)
            self.running = following
        return following

    def _supersede_next_round(self, newer: Round | None) -> None:
        task, self.next_round = self.next_round, None
        if task is not None:
            assert task.round is not None
            by = "the end of its session" if newer is None else f"round {newer.number}"
            task.settle(None, StaleRound(f"round {task.round.number} was superseded by {by} before it began"))


def _stale(late: Round, newer: Round) -> StaleEpoch | StaleRound:
    if late.epoch < newer.epoch:
        return StaleEpoch(f"epoch {late.epoch} of this session is over; epoch {newer.epoch} has begun")
    return StaleRound(f"round {late.number} of this session was superseded by round {newer.number}")


def too_late() -> DeadlineExceeded:
    """Return the error of a task whose deadline has passed."""
    return DeadlineExceeded("The request's deadline passed before its next step.")
