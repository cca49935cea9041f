"""The scheduler of one model: a step is schedule, run, postprocess. A queue of work stands before it.

A verify, a prefill in chunks and a draft's levels of several sessions all meet in the same batches. WorkQueue runs on
the event loop, Scheduler on the executor; between them only tasks are handed over. Knows nothing of drafts or targets.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from specsplit.core.errors import WorkerClosed
from specsplit.core.types import Timings
from specsplit.engine.batch import Batch, Round, Task, TaskOutcome, Work, WorkStatistics, end_work
from specsplit.engine.cancellation import to_its_end
from specsplit.engine.executor import DeviceHealth, Executor, LoopTurn, ThreadExecutor, ended, nothing, translated
from specsplit.engine.offered_tree import OfferedTree
from specsplit.engine.preemption import Preemption
from specsplit.engine.queue import SessionQueue, too_late
from specsplit.engine.step_budget import StepBudget
from specsplit.model.runner import PendingForward, Runner
from specsplit.telemetry import spans
from specsplit.telemetry.statistics import StepCounts

_log = logging.getLogger(__name__)
_SOON_S = 0.001
"""Seconds before the event loop's turn from which it has it behind a piece of work, so that it cuts none in two.

Chosen: a quarter of a turn; the draft's part of a round takes about as long. What is cut goes on through the queue.
"""
T = TypeVar("T")


class Scheduler:
    """Packs the tasks that are ready into one forward a step; driven by an executor.

    A task is in exactly one of three states: [arrived | running: ready | running: in a pending batch].
    If the runner's forwards are computed elsewhere, several batches may be pending at once.
    """

    def __init__(
        self, runner: Runner, executor: Executor, *, name: str, on_end: Callable[[Task, TaskOutcome | None], None]
    ) -> None:
        """Call `on_end` on the event loop with every task that ends, except for those that run inline."""
        self.health, self.counts = DeviceHealth(), StepCounts()
        self.budget = StepBudget(expects_company=executor.can_wait or runner.max_pending > 1)
        self.memory: Preemption | None = None
        self.now: Callable[[], float] = time.monotonic  # the clock of the tasks' deadlines
        self._runner, self._executor, self._name, self._on_end = runner, executor, name, on_end
        self._arrived, self._pending = list[Task](), dict[Batch, PendingForward]()
        self.running: dict[Task, None] = {}  # tasks that have begun and not ended

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._arrived)

    @property
    def can_step(self) -> bool:
        """Whether a step would do something now; all work may be pending elsewhere."""
        if not self._pending or self._arrived or any(forward.is_done for forward in self._pending.values()):
            return self.has_work
        idle = [task for task in self.running if not (task.is_pending or task.lacks_rows)]
        return bool(idle) and (len(self._pending) < self._runner.max_pending or any(task.is_cancelled for task in idle))

    @property
    def wait_s(self) -> float:
        """Seconds for which it pays to wait for more tasks before the next step; it is never a must."""
        return self.budget.wait_s(self.running, self._arrived) if self._runner.max_pending == 1 else 0.0

    def add(self, task: Task) -> None:
        """Let a task begin in the next step."""
        self._arrived.append(task)
        if self.budget.expects_company:
            self.budget.came(task)

    def step(self) -> None:
        """Begin the tasks that have arrived, then run one batch of all that are ready."""
        self.health.step_began_s = time.monotonic()
        try:
            self._poll()
            if (batch := self._schedule()) is not None:
                self._run(batch)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            self._fail_all(error)
        self.health.end_step()

    def run_inline(self, task: Task, loop_turn: LoopTurn) -> None:
        """Step a task that has no company where its caller stands, until it ends or the event loop is due a turn."""
        self.health.step_began_s = time.monotonic()
        try:
            self._advance(task, None)
            while not task.has_ended:
                if isinstance(task.sequence, OfferedTree):
                    self.budget.cut((task,))
                sequence, memory = task.sequence, self.memory
                if memory is not None and sequence is not None:
                    end_row = sequence.base_length + len(sequence.parents or sequence.token_ids)
                    if end_row > memory.reserved[sequence.slot] and not memory.make_room([task]):
                        break
                self._run(Batch([task]))
                if task.has_ended or loop_turn.is_over():  # the clock is not asked for nothing
                    break
        except Exception as error:  # noqa: BLE001 - as in `step`
            self._fail_all(error)
        self.health.end_step()

    def abandon(self) -> None:
        """End all tasks, since the executor ends and nobody will step any more."""
        self._end_all(ended(self._name))

    def _poll(self) -> None:
        """Begin the tasks that have arrived, and postprocess the batches that have come back from elsewhere."""
        arrived, self._arrived = self._arrived, []
        for task in arrived:
            if task.is_cancelled or task.deadline_s < self.now():
                self.finish(task, None, None if task.is_cancelled else too_late())
            else:
                self._advance(task, None)
        for batch, forward in list(self._pending.items()):
            if forward.is_done:
                self._land(batch, forward)

    def _schedule(self) -> Batch | None:
        """Return the batch that runs now: what the budget takes of the ready tasks; None if nothing can run."""
        now_s = self.now()
        for task in list(self.running):
            if not task.is_pending and (task.is_cancelled or task.deadline_s < now_s):
                task.work.close()
                self.finish(task, None, None if task.is_cancelled else too_late())
        ready = [task for task in self.running if not task.is_pending]
        # Rows are found before anything is cut: a task that has to go leaves its part of the step to others.
        if self.memory is not None:
            ready = self.memory.make_room(ready)
        # A forward on this device ends within its step, so only batches elsewhere take all the room.
        if not ready or len(self._pending) >= self._runner.max_pending:
            return None
        parts = {task: task.num_rows for task in ready if task.num_forwarded}
        if len(ready) > 1 or self._pending or self.budget.limits(ready[0]):
            ready, parts = self.budget.share_out(ready, self._pending)
        return Batch(ready, parts, self._pending)

    def _run(self, batch: Batch) -> None:
        """Run a batch and postprocess it, unless it is pending elsewhere; one that fails goes in parts, or ends."""
        if (width := self.budget.width).max_rows == math.inf or (most_rows := width.exceeded(batch)) is None:
            try:
                is_here = self._runner.max_pending == 1
                made = self._runner.forward(batch.sequences) if is_here else self._runner.begin(batch.sequences)
            except Exception as error:  # noqa: BLE001 - whatever the device raises ends these tasks, never the thread
                if (most_rows := width.rows_after(batch, error)) is None:
                    return self._fail(batch.tasks, error)
            else:
                return self._postprocess(batch, made) if isinstance(made, list) else self._await(batch, made)
        # Here the error is gone, and with it what the failed forward had computed.
        return width.run_parts(batch, most_rows, self._run)

    def _postprocess(self, batch: Batch, logits: list[Tensor]) -> None:
        """Give each task its logits: it asks for its next forward, or ends; one that was cut stays ready."""
        end_s = batch.end(self._name, self.counts)
        if len(batch.tasks) > 1 or end_s - batch.start_s < self.budget.quick_s:
            self.budget.observe(batch, end_s)
        for task, rows in zip(batch.tasks, logits, strict=True):
            whole = task.take_part(batch.parts[task], rows) if task in batch.parts else rows
            if whole is not None:
                self._advance(task, whole)

    def _await(self, batch: Batch, forward: PendingForward) -> None:
        self._pending[batch] = forward
        forward.when_done(lambda: self._executor.submit(self, nothing))

    def _land(self, batch: Batch, forward: PendingForward) -> None:
        """Postprocess a batch that has come back, unless some of it has to go out again."""
        del self._pending[batch]
        try:
            logits = forward.poll()
        except Exception as error:  # noqa: BLE001 - as in `_run`
            most_rows = self.budget.width.rows_after(batch, error)
            if most_rows is None:
                return self._fail(batch.tasks, error)
            self.budget.width.run_parts(batch, most_rows, self._run)
        else:
            self._postprocess(batch, logits) if logits is not None else self._await(batch, forward)

    def _advance(self, task: Task, logits: Tensor | None) -> None:
        """Run a task's own code up to its next forward or its end; without logits it begins."""
        times, start_s = task.times, time.perf_counter()
        try:
            if logits is None:
                self.running[task], times.begun_s = None, start_s
                task.sequence = next(task.work)
            else:
                task.sequence = task.work.send(logits)
                times.sampling_s += time.perf_counter() - start_s
            times.ready_s = time.perf_counter()
        except StopIteration as stop:
            times.sampling_s += time.perf_counter() - start_s
            self.finish(task, stop.value, None)
        except Exception as error:  # noqa: BLE001 - the work's own error belongs to its caller
            self.finish(task, None, translated(error))

    def finish(self, task: Task, result: Any, error: Exception | None) -> None:
        """Let go of a task. Its timings end here, on the executor; its callers are answered on the event loop."""
        self.running.pop(task, None)
        # A success counts only if the device computed something, and a cancelled task's result is worth nothing.
        if error is not None:
            self.health.fail(error)
        elif task.times.num_forwards and not task.is_cancelled:
            self.health.has_succeeded = True
        task.error, outcome = error, (result, task.times.timings())
        if task.is_inline:
            task.has_ended, task.outcome = True, outcome
        else:
            if self.budget.expects_company:
                self.budget.left(task)
            self._executor.deliver(task.loop, lambda: self._on_end(task, outcome))

    def _fail(self, tasks: Sequence[Task], error: Exception) -> None:
        for task in tasks:
            end_work(task.work, error)
            self.finish(task, None, translated(error))

    def _fail_all(self, error: Exception) -> None:
        """End all tasks for a mistake outside a forward, which must not end the executor."""
        _log.error("the %s worker failed outside a forward", self._name, exc_info=error)
        self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        tasks = [*self.running, *self._arrived]
        # Cleared first: a task that is closed below must not be found again by a step that was interrupted here.
        self.running.clear()
        self._arrived.clear()
        self._pending.clear()
        self._fail(tasks, error)


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

    def has(self, session: str) -> bool:
        return session in self._queues

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(len(self._queues), len(self.scheduler.running), self.scheduler.has_work)

    async def run(
        self, session: str | None, work: Work, this_round: Round | None = None, deadline_s: float = math.inf
    ) -> tuple[Any, Timings]:
        """Do the work on the executor, where it begins as well, and return its result.

        One piece of a session's work runs at a time. A round that is newer waits for it, in one place: a still newer
        one supersedes it. A repeat joins. Work of a session that is no round closes the session: it supersedes the
        round that waits and is not superseded. Work of no session (None) begins in the next step.

        If its last caller is cancelled, the work ends before its next step; it has ended once this coroutine has.
        After `deadline_s` on the scheduler's clock it neither begins nor takes a further step, but for those that its
        caller runs by itself until the event loop is due a turn.

        Raises:
            DeadlineExceeded: the deadline has passed.
            WorkerClosed: after `close`.
            WorkerFailed: the executor has ended by itself.
            StaleRound, StaleEpoch: a newer round of the session is running or waiting, or came while this one waited.
            InvalidRequest: the same round is running or waiting with another body.
        """
        self._check_open()
        trace = spans.current() if spans.is_on else None
        task = Task(session, this_round, work, asyncio.get_running_loop(), trace, deadline_s)
        loop_turn = self._executor.try_run_inline(session) if session is not None else None
        if loop_turn is None or session in self._queues or self._runner.max_pending > 1:
            task = self._place(task)
        else:
            task.is_inline = True
            self.scheduler.run_inline(task, loop_turn)
            if task.has_ended:
                if loop_turn.is_over(within_s=_SOON_S):
                    await loop_turn.yield_to_loop()
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
            raise ended(self._name)

    def _closed(self) -> WorkerClosed:
        return WorkerClosed(f"The {self._name} worker has been closed; start a new one.")
