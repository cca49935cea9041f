"""Who of one session comes in: one piece of work runs, one newer round and one end wait, repeats join.

Bounded by construction, however many calls of a session arrive. Knows neither models nor slots; event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context
from torch import Tensor

from specsplit.core.errors import InvalidRequest, StaleEpoch, StaleRound
from specsplit.core.record import record
from specsplit.core.types import Timings
from specsplit.model.attention.metadata import SequenceInput

Work = Generator[SequenceInput, Tensor, Any]
TaskOutcome = tuple[Any, Timings]
MAX_CALLERS = 16
"""Callers that may wait for one round; one more sends the oldest away."""


@record
class Round:
    """Which round of its session a piece of work is; a repeat has the same `body`."""

    epoch: int
    number: int
    body: object

    def is_before(self, other: Round) -> bool:
        return (self.epoch, self.number) < (other.epoch, other.number)

    def is_repeat_of(self, other: Round) -> bool:
        """Return whether this is the other round again.

        Raises:
            InvalidRequest: the same round with another body.
        """
        if (self.epoch, self.number) != (other.epoch, other.number):
            return False
        if self.body != other.body:
            raise InvalidRequest(f"Round {self.number} of this session had another body before.", param="round")
        return True


@dataclass(slots=True, eq=False)
class Task:
    """One piece of work on its way through the worker, and whoever waits for its outcome."""

    session: str | None
    """None for work of no session."""
    round: Round | None
    """None for what ends a session, or belongs to none."""
    work: Work
    loop: asyncio.AbstractEventLoop
    context: Context | None
    callers: list[asyncio.Future[TaskOutcome]] = field(default_factory=list)
    submitted_s: float = field(default_factory=time.perf_counter)
    has_ended: bool = False
    """The worker has let go of the task."""
    entry: SequenceInput | None = None
    is_under_way: bool = False
    """Its entry is in a step that has not ended."""
    cancelled: bool = False
    begun_s: float = 0.0
    ready_s: float = 0.0
    """When its entry was made."""
    waited_s: float = 0.0
    """Begun, and no step had room."""
    device_ms: float = 0.0
    num_forwards: int = 0
    num_tokens: int = 0
    batch_size: int = 1
    is_alone: bool = False
    """Its caller steps it, and asks for the outcome."""
    outcome: TaskOutcome | None = None
    error: Exception | None = None
    _ended: asyncio.Event | None = None

    def timings(self) -> Timings:
        now = time.perf_counter()
        return Timings(
            wall_ms=(now - self.submitted_s) * 1e3,
            queue_ms=(self.begun_s - self.submitted_s + self.waited_s) * 1e3,
            device_ms=self.device_ms,
            num_forwards=self.num_forwards,
            num_tokens=self.num_tokens,
            batch_size=self.batch_size,
        )

    def join(self) -> asyncio.Future[TaskOutcome]:
        """Return a future of the outcome; of too many who wait for a round, the oldest is sent away."""
        if self.round is not None and len(self.callers) == MAX_CALLERS:
            oldest = self.callers.pop(0)
            _fail(oldest, StaleRound(f"round {self.round.number} was superseded by a repeat of itself"))
        future: asyncio.Future[TaskOutcome] = self.loop.create_future()
        self.callers.append(future)
        return future

    def leave(self, future: asyncio.Future[TaskOutcome]) -> bool:
        """Take a caller away; return False if it was told, or sent away, before."""
        if future in self.callers:
            self.callers.remove(future)
            return True
        if not future.cancelled():
            future.exception()  # nobody else will ask for it
        return False

    def result(self) -> TaskOutcome:
        """Return the outcome of a task that has ended, or raise its error."""
        if self.error is not None:
            raise self.error
        assert self.outcome is not None, "it has ended"
        return self.outcome

    async def wait_ended(self) -> None:
        """Wait until the worker has let go of the task, also after its callers were cancelled."""
        if not self.has_ended:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()

    def settle(self, outcome: TaskOutcome | None, error: Exception | None) -> None:
        """Tell everybody who waits; for a cancelled task, nobody does."""
        self.has_ended = True
        self.outcome, self.error = outcome, error
        if self._ended is not None:
            self._ended.set()
        callers, self.callers = self.callers, []
        for future in callers:
            if error is not None:
                _fail(future, error)
            elif not future.done():
                assert outcome is not None, "only a task that nobody waits for ends without an outcome"
                future.set_result(outcome)


def _fail(future: asyncio.Future[TaskOutcome], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class SessionQueue:
    """One session's tasks, at most three; `running` is the one that the worker has."""

    def __init__(self, task: Task) -> None:
        self.running = task
        self.waiting: Task | None = None
        """The newest round, unless it runs."""
        self.ending: Task | None = None
        """The end of the session, which goes before `waiting`: rounds that came before it are void."""

    def place(self, task: Task) -> Task:
        """Give a task its place and return it, or the equal one that it joins.

        Raises:
            StaleRound, StaleEpoch: a later one is running or waiting.
            InvalidRequest: the round that is running or waiting, with another body.
        """
        if task.round is None:
            return self._place_end(task)
        for other in (self.running, self.waiting):
            if other is None or other.round is None or other.cancelled:
                continue
            if task.round.is_repeat_of(other.round):
                return other
            if task.round.is_before(other.round):
                raise _stale(task.round, other.round)
        self._void_waiting(task.round)
        self.waiting = task
        return task

    def _place_end(self, task: Task) -> Task:
        self._void_waiting(None)
        if self.ending is not None:
            return self.ending
        if self.running.round is None and not self.running.cancelled:
            return self.running
        self.ending = task
        return task

    def withdraw(self, task: Task) -> bool:
        """Take back a task that has not begun; return whether it was waiting here."""
        if task is self.waiting:
            self.waiting = None
        elif task is self.ending:
            self.ending = None
        else:
            return False
        return True

    def advance(self) -> Task | None:
        """Return the task that runs now that the last one has ended, None if none is left."""
        following = self.ending or self.waiting
        if following is not None:
            self.withdraw(following)
            self.running = following
        return following

    def _void_waiting(self, newer: Round | None) -> None:
        task, self.waiting = self.waiting, None
        if task is not None:
            assert task.round is not None
            by = "the end of its session" if newer is None else f"round {newer.number}"
            task.settle(None, StaleRound(f"round {task.round.number} was superseded by {by} before it began"))


def _stale(late: Round, newer: Round) -> StaleEpoch | StaleRound:
    if late.epoch < newer.epoch:
        return StaleEpoch(f"epoch {late.epoch} of this session is over; epoch {newer.epoch} has begun")
    return StaleRound(f"round {late.number} of this session was superseded by round {newer.number}")
