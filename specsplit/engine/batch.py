"""A task is one piece of a session's work; a batch is the tasks whose next forwards run as one.

Work comes as a generator: it yields the SequenceInput that it wants forwarded and is sent the logits, until it returns
its result. Of a text to be scored a step may take the first rows only; then it is sent their logits, and yields what is
left. Knows neither queues nor sessions.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specsplit.core.errors import InvalidRequest, StaleRound
from specsplit.core.record import record
from specsplit.core.types import Timings
from specsplit.model.attention.metadata import SequenceInput
from specsplit.telemetry import spans
from specsplit.telemetry.statistics import StepCounts

Work = Generator[SequenceInput, Tensor, Any]
TaskOutcome = tuple[Any, Timings]
MOST_ROUND_ROWS = 64
"""A forward of more rows without a tree is a piece of a prompt. Chosen: more than a tree with the tail before it."""
MAX_CALLERS = 16
"""Callers that may wait for one round; one more sends the oldest away."""


def at_once(action: Callable[[], Any]) -> Work:
    """Return work that does `action` without a forward."""
    return action()
    yield  # a generator all the same


@record
class Round:
    """Identifies a round within its session; a repeat of it has the same `body`."""

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


@dataclass(slots=True)
class TaskTimes:
    """The cost of a task so far; moments are on the perf_counter clock."""

    submitted_s: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108 - tests replace the clock
    begun_s: float = 0.0
    ready_s: float = 0.0
    """When its next forward was ready to run."""
    waited_s: float = 0.0
    """Seconds in which a forward of it was ready and no batch had room."""
    device_ms: float = 0.0
    sampling_s: float = 0.0
    num_forwards: int = 0
    num_tokens: int = 0
    batch_size: int = 1
    step_rows: int = 0

    def timings(self) -> Timings:
        now_s = time.perf_counter()
        return Timings(
            wall_ms=(now_s - self.submitted_s) * 1e3,
            queue_ms=(self.begun_s - self.submitted_s + self.waited_s) * 1e3,
            device_ms=self.device_ms,
            num_forwards=self.num_forwards,
            num_tokens=self.num_tokens,
            batch_size=self.batch_size,
            step_rows=self.step_rows,
            sampling_ms=self.sampling_s * 1e3,
        )


@dataclass(slots=True, eq=False)
class Task:
    """One piece of work on its way through the scheduler, and the callers that wait for its outcome."""

    session: str | None
    """None for work that belongs to no session."""
    round: Round | None
    """None for work that closes its session, or belongs to none."""
    work: Work
    loop: asyncio.AbstractEventLoop
    trace: spans.SpanContext | None
    deadline_s: float = math.inf
    """When its request is given up, on the scheduler's clock: looked at before it begins, and before every step."""
    callers: list[asyncio.Future[TaskOutcome]] = field(default_factory=list)
    # The executor writes `times`, `sequence`, `is_pending` and `error`, the event loop the rest; `deliver`, which hands
    # a task that has ended to the loop, orders one before the other.
    times: TaskTimes = field(default_factory=TaskTimes)
    sequence: SequenceInput | None = None
    """Its next forward."""
    num_forwarded: int = 0
    """The first rows of that forward which went with earlier steps; none of their logits was asked for."""
    is_rest: bool = False
    """A step has taken the first rows of a forward before it, so it may be cut as well, however short it is."""
    is_pending: bool = False
    """Its next forward is in a batch that has not come back."""
    lacks_rows: bool = False
    """Its next forward waits for memory that others are about to free."""
    is_cancelled: bool = False
    """Nobody waits for it any more."""
    is_inline: bool = False
    """Its caller steps it, and takes the outcome from here."""
    has_ended: bool = False
    """The scheduler has let go of it, and its callers have been answered."""
    outcome: TaskOutcome | None = None
    error: Exception | None = None
    _ended: asyncio.Event | None = None

    @property
    def num_rows(self) -> int:
        """Rows of its next forward that are still to be forwarded."""
        assert self.sequence is not None, "a task that is ready has one"
        return len(self.sequence.token_ids) - self.num_forwarded

    @property
    def slot(self) -> int:
        """The slot of its next forward."""
        assert self.sequence is not None, "a task that is ready has one"
        return self.sequence.slot

    @property
    def end_row(self) -> int:
        """The first row of its slot behind those that its next forward writes."""
        assert self.sequence is not None, "a task that is ready has one"
        return self.sequence.base_length + self.sequence.num_tree_rows

    @property
    def context(self) -> int:
        """Tokens in the slot before the next of these rows."""
        assert self.sequence is not None, "a task that is ready has one"
        return self.sequence.base_length + self.num_forwarded

    @property
    def arrived_s(self) -> float:
        return self.times.submitted_s

    @property
    def can_be_cut(self) -> bool:
        """Whether its next forward is a long piece of a prompt, or of a text to be scored: a step may take a part."""
        sequence = self.sequence
        return (
            type(sequence) is SequenceInput
            and (len(sequence.token_ids) > MOST_ROUND_ROWS or self.is_rest)
            and sequence.parents is None
            and (sequence.num_logits == 1 or self.session is None)
        )

    def next_rows(self, count: int) -> SequenceInput:
        """Return the next `count` rows of its forward, which can be cut."""
        assert self.sequence is not None, "a task that is ready has one"
        first, base_length = self.num_forwarded, self.sequence.base_length
        tokens = self.sequence.token_ids[first : first + count]
        num_logits, request = self._num_logits_of(count), self.sequence.head_request
        if request is not None:
            request = request.of_first(num_logits) if num_logits > 0 else None
        return SequenceInput(self.sequence.slot, base_length + first, tokens, None, max(1, num_logits), request)

    def _num_logits_of(self, count: int) -> int:
        # Rows of the forward: [no logits | num_logits of them), of which the part is [num_forwarded, ... + count).
        assert self.sequence is not None, "a task that is ready has one"
        return self.num_forwarded + count - (len(self.sequence.token_ids) - self.sequence.num_logits)

    def take_part(self, count: int, logits: Tensor) -> Tensor | None:
        """Count the next rows of its forward as done; return their logits if some were asked for, or with the last."""
        is_answer = self._num_logits_of(count) > 0 or count == self.num_rows
        self.is_rest = is_answer and count < self.num_rows
        self.num_forwarded = 0 if is_answer else self.num_forwarded + count
        self.times.ready_s = time.perf_counter()
        return logits if is_answer else None

    def join(self) -> asyncio.Future[TaskOutcome]:
        """Return a future of the outcome; if too many wait for a round, the oldest is sent away."""
        if self.round is not None and len(self.callers) == MAX_CALLERS:
            oldest = self.callers.pop(0)
            _fail(oldest, StaleRound(f"round {self.round.number} was superseded by a repeat of itself"))
        future: asyncio.Future[TaskOutcome] = self.loop.create_future()
        self.callers.append(future)
        return future

    def leave(self, future: asyncio.Future[TaskOutcome]) -> bool:
        """Take a caller away; return False if it was answered, or sent away, before."""
        if future in self.callers:
            self.callers.remove(future)
            return True
        if not future.cancelled():
            future.exception()  # nobody else will ask for it
        return False

    async def wait_ended(self) -> None:
        """Wait until the scheduler has let go of the task, even after its callers were cancelled."""
        if not self.has_ended:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()

    def settle(self, outcome: TaskOutcome | None, error: Exception | None) -> None:
        """Answer all callers; a cancelled task, which has none, may end without an outcome."""
        self.has_ended = True
        self.outcome, self.error = outcome, error
        if self._ended is not None:
            self._ended.set()
        callers, self.callers = self.callers, []
        for future in callers:
            if error is not None:
                _fail(future, error)
            elif not future.done():
                assert outcome is not None, "only a task without callers ends without an outcome"
                future.set_result(outcome)


def _fail(future: asyncio.Future[TaskOutcome], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


@record
class WorkStatistics:
    """The work of one model at one moment."""

    num_sessions: int
    """Sessions that have a queue."""
    num_running: int
    has_work: bool


def num_attended(rows: int, context: int) -> float:
    """Return the pairs of one of `rows` rows and a token that it attends to, behind `context` tokens."""
    return rows * (context + rows / 2)


def end_work(work: Work, error: Exception) -> None:
    """Tell work of the error that ends it; one that is closed instead was not wanted any more."""
    raised_at = error.__traceback__
    with suppress(Exception):  # whatever it makes of that, its caller hears of what failed
        work.throw(error)
    error.__traceback__ = raised_at  # the frames of the work would keep what a failed forward had computed
    work.close()


_ALL: Mapping[Task, int] = {}


class Batch:
    """The tasks of one step with their sequences, in the same order; its forward begins when it is made.

    `parts` says of some tasks how many of their next rows go; the others go with all. A batch that was under way while
    another one was `is_overlapped`: its time is not its own. Since `busy_since_s` some batch was always under way, and
    `after_s` is when the last one ended before this one did.
    """

    __slots__ = ("after_s", "busy_since_s", "is_overlapped", "parts", "sequences", "start_s", "tasks")

    def __init__(self, tasks: Sequence[Task], parts: Mapping[Task, int] = _ALL, beside: Collection[Batch] = ()) -> None:
        self.tasks, self.parts, self.is_overlapped = tasks, parts, bool(beside)
        self.sequences: list[SequenceInput] = []
        self.start_s = self.busy_since_s = time.perf_counter()
        for other in beside:
            other.is_overlapped = True
            self.busy_since_s = min(self.busy_since_s, other.busy_since_s)
        for task in tasks:
            assert task.sequence is not None, "a task that is ready has one"
            self.sequences.append(task.next_rows(parts[task]) if task in parts else task.sequence)
            task.is_pending, task.lacks_rows = True, False
            task.times.waited_s += self.start_s - task.times.ready_s
        if spans.is_on:
            spans.forward_for([task.trace for task in tasks])

    @property
    def num_rows(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_pairs(self) -> float:
        """Pairs of a row and a token that it attends to."""
        return sum(num_attended(len(sequence.token_ids), sequence.base_length) for sequence in self.sequences)

    def end(self, scheduler: str, counts: StepCounts) -> float:
        """Count the forward, for every task as well, and record it for those that have a span; return the moment."""
        end_s = time.perf_counter()
        elapsed_ms = (end_s - self.start_s) * 1e3
        counts.num_steps += 1
        counts.num_sequences += len(self.sequences)
        self.after_s = counts.busy_until_s
        counts.busy_s += end_s - max(self.busy_since_s, self.after_s)
        counts.busy_until_s = end_s
        rows_before = counts.num_rows
        for task, sequence in zip(self.tasks, self.sequences, strict=True):
            task.is_pending = False
            times = task.times
            times.device_ms += elapsed_ms
            times.num_forwards += 1
            num_rows = len(sequence.token_ids)
            times.num_tokens += num_rows
            counts.num_rows += num_rows
            times.batch_size = max(times.batch_size, len(self.sequences))
            if task.trace is not None:
                end_ns = time.time_ns()
                spans.record(
                    "forward",
                    task.trace,
                    end_ns - round(elapsed_ms * 1e6),
                    end_ns,
                    worker=scheduler,
                    num_tokens=num_rows,
                    base_length=sequence.base_length,
                    batch_size=len(self.sequences),
                )
        step_rows = counts.num_rows - rows_before
        for task in self.tasks:
            task.times.step_rows = max(task.times.step_rows, step_rows)
        return end_s
