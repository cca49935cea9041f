"""The queue of work before one model's scheduler: of each session one piece at a time.

WorkQueue runs on the event loop, Scheduler on the executor; between them only tasks are handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from specsplit.core.cancellation import to_its_end
from specsplit.core.errors import WorkerClosed
from specsplit.core.record import record
from specsplit.core.types import Timings
from specsplit.engine.batch import Round, Task, TaskOutcome, Work
from specsplit.engine.executor import Executor, ThreadExecutor
from specsplit.engine.queue import SessionQueue
from specsplit.engine.scheduler import Scheduler, executor_ended, nothing
from specsplit.model.runner import Runner
from specsplit.telemetry import spans

T = TypeVar("T")


def at_once(action: Callable[[], Any]) -> Work:
    """Return work that does `action` without a forward."""
    return action()
    yield  # a generator all the same


@record
class WorkStatistics:
    """The work of one model at one moment."""

    num_sessions: int
    """Sessions that have a queue."""
    num_running: int
    has_work: bool


class WorkQueue:
    """Does the work of many sessions over one model, and of each session one piece at a time. Event loop only.

    Without an `executor` it owns a thread, with `threads` for the operators; a shared one is its owner's to close.
    """

    def __init__(
        self, runner: Runner, *, name: str, threads: int | None = None, executor: Executor | None = None
    ) -> None:
        self._runner, self._name = runner, name
        self._queues: dict[str, SessionQueue] = {}
        self._is_closed = False
        self._owns_executor = executor is None
        self._executor = executor or ThreadExecutor(name, threads)
        self.scheduler = Scheduler(runner, self._executor, name=name, on_end=self._settle)

    @property
    def is_well(self) -> bool:
        """Whether the device computes: False after several failed steps in a row, until one succeeds."""
        return self.is_alive and self.scheduler.health.is_well

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last step failed: another one would show more."""
        return self.is_alive and self.scheduler.health.is_in_doubt

    @property
    def is_alive(self) -> bool:
        """Whether it may ever be well again: False once the executor has ended, or hangs in a step."""
        return self._executor.is_alive and not self.scheduler.health.is_hung

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(len(self._queues), self.scheduler.num_running, self.scheduler.has_work)

    async def run(self, session: str | None, work: Work, this_round: Round | None = None) -> tuple[Any, Timings]:
        """Do the work on the executor, where it begins as well, and return its result.

        One piece of a session's work runs at a time. A round that is newer waits for it, in one place: a still newer
        one supersedes it. A repeat joins. Work of a session that is no round closes the session: it supersedes the
        round that waits and is not superseded. Work of no session (None) begins in the next step.

        If its last caller is cancelled, the work ends before its next step; it has ended once this coroutine has.

        Raises:
            WorkerClosed: after `close`.
            WorkerFailed: the executor has ended by itself.
            StaleRound, StaleEpoch: a newer round of the session is running or waiting, or came while this one waited.
            InvalidRequest: the same round is running or waiting with another body.
        """
        self._check_open()
        context = spans.current() if spans.is_on else None
        task = Task(session, this_round, work, asyncio.get_running_loop(), context)
        turn = self._executor.try_run_inline(session) if session is not None else None
        if turn is None or session in self._queues or self._runner.max_pending > 1:
            task = self._place(task)
        else:
            task.is_inline = True
            self.scheduler.run_inline(task, turn)
            if task.has_ended:
                if turn.is_over:
                    await turn.yield_to_loop()
                if task.error is not None:
                    raise task.error
                assert task.outcome is not None, "a task without an error has an outcome"
                return task.outcome
            self._go_on(task)
        # `task` may be an equal one that was here before: this caller then waits beside the others.
        future = task.join()
        try:
            return await future
        except asyncio.CancelledError:
            await self._leave(task, future)
            raise

    def do_now(self, action: Callable[[], T]) -> T:
        """Do `action` here and now; the caller sees to it that no other work is under way.

        Raises:
            WorkerClosed: after `close`; WorkerFailed: the executor has ended by itself.
        """
        self._check_open()
        with self.scheduler.health.judging():
            return action()

    async def close(self) -> None:
        """End the work that runs, refuse what waits for it and all that comes; closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._owns_executor:
                await self._executor.close()

    def _go_on(self, task: Task) -> None:
        """Let a task that began inline go on in common steps, where newer rounds of its session wait for it."""
        assert task.session is not None, "only work of a session runs inline"
        task.is_inline = False
        self._queues[task.session] = SessionQueue(task)
        self._executor.submit(self.scheduler, nothing)

    def _place(self, task: Task) -> Task:
        """Hand a task over, or let it wait for its session's running one; return it, or the equal one it joins."""
        if task.session is not None:
            queue = self._queues.get(task.session)
            # A task whose event loop is closed would never be settled: nobody may wait for it.
            if queue is not None and not queue.running.loop.is_closed():
                return queue.add(task)
            self._queues[task.session] = SessionQueue(task)
        self._submit(task)
        return task

    def _submit(self, task: Task) -> None:
        self._executor.submit(self.scheduler, lambda: self.scheduler.add(task))

    async def _leave(self, task: Task, future: asyncio.Future[tuple[Any, Timings]]) -> None:
        """Take a cancelled caller from a task; the last one ends it."""
        if not task.leave(future) or task.callers:
            return
        queue = self._queues.get(task.session) if task.session is not None else None
        if queue is None or not queue.remove(task):
            task.is_cancelled = True
            self._executor.submit(self.scheduler, nothing)
            await to_its_end(task.wait_ended())

    def _settle(self, task: Task, outcome: TaskOutcome | None) -> None:
        """Answer the callers of a task that has ended, and begin the one that waits for it."""
        task.settle(outcome, task.error)
        if task.session is not None:
            self._advance_queue(task.session)

    def _advance_queue(self, session: str) -> None:
        queue = self._queues[session]
        following = queue.advance()
        while following is not None and self._is_closed:
            following.settle(None, self._closed())
            following = queue.advance()
        if following is None:
            del self._queues[session]
        else:
            self._submit(following)

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed()
        if not self._executor.is_alive:
            raise executor_ended(self._name)

    def _closed(self) -> WorkerClosed:
        return WorkerClosed(f"The {self._name} worker has been closed; start a new one.")
