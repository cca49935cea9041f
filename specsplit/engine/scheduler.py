"""The scheduler of one model: a step is schedule, run, postprocess.

A verify, a prefill in chunks and a draft's levels of several sessions all meet in the same batches. Knows nothing of
drafts or targets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from specsplit.core.errors import OutOfMemory, WorkerFailed
from specsplit.engine.batch import Batch, Task, TaskOutcome
from specsplit.engine.executor import DeviceHealth, Executor, LoopTurn
from specsplit.engine.step_budget import StepBudget
from specsplit.model.runner import PendingForward, Runner

_log = logging.getLogger(__name__)
T = TypeVar("T")


def nothing() -> None:
    """Accept nothing: the executor only has to look at the scheduler again."""


class Scheduler:
    """Packs the tasks that are ready into one forward a step; driven by an executor.

    A task is in exactly one of three states: [arrived | running: ready | running: in a pending batch].
    If the runner's forwards are computed elsewhere, several batches may be pending at once.
    """

    def __init__(
        self, runner: Runner, executor: Executor, *, name: str, on_end: Callable[[Task, TaskOutcome | None], None]
    ) -> None:
        """Call `on_end` on the event loop with every task that ends, except for those that run inline."""
        self.health = DeviceHealth()
        self.budget = StepBudget()
        self._runner, self._executor, self._name, self._on_end = runner, executor, name, on_end
        self._arrived: list[Task] = []
        self._running: dict[Task, None] = {}
        self._pending: dict[Batch, PendingForward] = {}

    @property
    def num_running(self) -> int:
        """Tasks that have begun and not ended."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._arrived)

    @property
    def can_step(self) -> bool:
        """Whether a step would do something now; all work may be pending elsewhere."""
        if not self._pending or self._arrived or any(forward.is_done for forward in self._pending.values()):
            return self.has_work
        idle = [task for task in self._running if not task.is_pending]
        has_room = len(self._pending) < self._runner.max_pending
        return bool(idle) and (has_room or any(task.is_cancelled for task in idle))

    def add(self, task: Task) -> None:
        """Let a task begin in the next step."""
        self._arrived.append(task)

    def step(self) -> None:
        """Begin the tasks that have arrived, then run one batch of all that are ready."""
        self.health.step_began_s = time.monotonic()
        try:
            self._poll()
            batch = self._schedule()
            if batch is not None:
                logits = self._run(batch)
                self._postprocess(batch, logits)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            self._fail_all(error)
        self.health.end_step()

    def run_inline(self, task: Task, turn: LoopTurn) -> None:
        """Step a task that has no company where its caller stands, until it ends or the event loop is due a turn."""
        self.health.step_began_s = time.monotonic()
        try:
            self._advance(task, None)
            while not task.has_ended:
                batch = Batch([task])
                logits = self._run(batch)
                self._postprocess(batch, logits)
                if task.has_ended or turn.is_over:  # the clock is not asked for nothing
                    break
        except Exception as error:  # noqa: BLE001 - as in `step`
            self._fail_all(error)
        self.health.end_step()

    def abandon(self) -> None:
        """End all tasks, since the executor ends and nobody will step any more."""
        self._end_all(executor_ended(self._name))

    def _poll(self) -> None:
        """Begin the tasks that have arrived, and postprocess the batches that have come back from elsewhere."""
        arrived, self._arrived = self._arrived, []
        for task in arrived:
            if task.is_cancelled:
                self._finish(task, None, None)
            else:
                self._advance(task, None)
        for batch, forward in list(self._pending.items()):
            if forward.is_done:
                self._land(batch, forward)

    def _schedule(self) -> Batch | None:
        """Return the batch that runs now: what the budget takes of the ready tasks; None if nothing can run."""
        ready: list[Task] = []
        for task in list(self._running):
            if task.is_pending:
                continue
            if task.is_cancelled:
                task.work.close()
                self._finish(task, None, None)
            else:
                ready.append(task)
        # A forward on this device ends within its step, so only batches elsewhere can take all the room.
        if not ready or len(self._pending) >= self._runner.max_pending:
            return None
        parts = {task: task.num_rows for task in ready if task.num_forwarded}
        if len(ready) > 1 and self._runner.max_pending == 1:  # a chain cuts prompts into packets by itself
            parts = self.budget.share_out(ready)
            ready = [task for task in ready if parts.get(task) != 0]
        return Batch(ready, parts)

    def _run(self, batch: Batch) -> list[Tensor] | None:
        """Return the batch's logits; None if it is pending elsewhere, or failed, which ends its tasks."""
        try:
            if self._runner.max_pending == 1:
                return self._runner.forward(batch.sequences)
            forward = self._runner.begin(batch.sequences)
        except Exception as error:  # noqa: BLE001 - whatever the device raises ends these tasks, never the thread
            self._fail(batch, error)
        else:
            self._await(batch, forward)
        return None

    def _postprocess(self, batch: Batch, logits: list[Tensor] | None) -> None:
        """Give each task its logits: it asks for its next forward, or ends. Without logits it does nothing.

        A task of which only a part was forwarded stays ready for the rest.
        """
        if logits is None:
            return
        batch.end(self._name)
        for task, rows in zip(batch.tasks, logits, strict=True):
            if task not in batch.parts or not task.forwarded(batch.parts[task]):
                self._advance(task, rows)

    def _await(self, batch: Batch, forward: PendingForward) -> None:
        self._pending[batch] = forward
        forward.when_done(lambda: self._executor.submit(self, nothing))

    def _land(self, batch: Batch, forward: PendingForward) -> None:
        """Postprocess a batch that has come back, unless some of it has to go out again."""
        del self._pending[batch]
        try:
            logits = forward.poll()
        except Exception as error:  # noqa: BLE001 - as in `_run`
            self._fail(batch, error)
            return
        if logits is None:
            self._await(batch, forward)
        else:
            self._postprocess(batch, logits)

    def _advance(self, task: Task, logits: Tensor | None) -> None:
        """Run a task's own code up to its next forward or its end; without logits it begins."""
        times, start_s = task.times, time.perf_counter()
        try:
            if logits is None:
                self._running[task] = None
                times.begun_s = start_s
                task.sequence = next(task.work)
            else:
                task.sequence = task.work.send(logits)
                times.sampling_s += time.perf_counter() - start_s
            times.ready_s = time.perf_counter()
        except StopIteration as stop:
            times.sampling_s += time.perf_counter() - start_s
            self._finish(task, stop.value, None)
        except Exception as error:  # noqa: BLE001 - the work's own error belongs to its caller
            self._finish(task, None, error)

    def _finish(self, task: Task, result: Any, error: Exception | None) -> None:
        """Let go of a task. Its timings end here, on the executor; its callers are answered on the event loop."""
        self._running.pop(task, None)
        # A success counts only if the device computed something, and a cancelled task's result is worth nothing.
        if error is not None:
            self.health.fail(error)
        elif task.times.num_forwards and not task.is_cancelled:
            self.health.has_succeeded = True
        outcome = (result, task.times.timings())
        task.error = error
        if task.is_inline:
            task.has_ended, task.outcome = True, outcome
        else:
            self._executor.deliver(task.loop, lambda: self._on_end(task, outcome))

    def _fail(self, batch: Batch, error: Exception) -> None:
        for task in batch.tasks:
            task.work.close()
            self._finish(task, None, _translated(error))

    def _fail_all(self, error: Exception) -> None:
        """End all tasks for a mistake outside a forward, which must not end the executor."""
        _log.error("the %s worker failed outside a forward", self._name, exc_info=error)
        self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        tasks = [*self._running, *self._arrived]
        # Cleared first: a task that is closed below must not be found again by a step that was interrupted here.
        self._running.clear()
        self._arrived.clear()
        self._pending.clear()
        for task in tasks:
            task.work.close()
            self._finish(task, None, error)


def executor_ended(name: str) -> WorkerFailed:
    return WorkerFailed(f"The device of the {name} worker has ended by itself; restart the worker.")


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


def _translated(error: Exception) -> Exception:
    # A recording reports everything as a RuntimeError, and so does a failed allocation on the CPU.
    is_memory = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    if is_memory or isinstance(error, MemoryError):
        return OutOfMemory("The device ran out of memory during a forward; use a smaller --context or fewer --nodes.")
    return error
