"""The work on one model: step = schedule, run, postprocess.

Work comes as generators that yield the Entry they want forwarded and are sent its logits, so a verify, a prefill in
chunks and a draft's levels of several sessions all meet in the same packed steps. Knows nothing of drafts or targets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from specsplit.core.cancellation import to_its_end
from specsplit.core.errors import OutOfMemory, WorkerClosed, WorkerFailed
from specsplit.core.types import Timings
from specsplit.engine.batch import Step
from specsplit.engine.device_health import DeviceHealth
from specsplit.engine.executor import Executor, ThreadExecutor
from specsplit.engine.queue import Round, SessionQueue, Task, Work
from specsplit.model.runner import PendingForward, Runner
from specsplit.telemetry import spans

_log = logging.getLogger(__name__)


def at_once(action: Callable[[], Any]) -> Work:
    """Return work that does `action` without a forward."""
    return action()
    yield  # a generator all the same


def _nothing() -> None:
    """Accept nothing: the device is only told that something came back, or that nobody waits any more."""


class Scheduler:
    """Runs tasks over one model, packing all that are ready into one forward a step.

    Where the runner's forwards are computed elsewhere several steps may be under way at once.

    Without a `device` it owns a thread, with `threads` for the operators; a shared one is its owner's to close.
    """

    def __init__(
        self, runner: Runner, *, name: str, threads: int | None = None, device: Executor | None = None
    ) -> None:
        self._runner, self._name = runner, name
        self._lines: dict[str, SessionQueue] = {}
        self._waiting: list[Task] = []
        self._running: dict[Task, None] = {}
        self._under_way: dict[Step, PendingForward] = {}
        self._is_closed = False
        self._condition = DeviceHealth()
        self._owns_device = device is None
        self._device = device or ThreadExecutor(name, threads)

    @property
    def num_lines(self) -> int:
        """Sessions that have work here."""
        return len(self._lines)

    @property
    def is_well(self) -> bool:
        """Whether the device computes: False after several failed steps in a row, until one succeeds."""
        return self.is_alive and self._condition.is_well

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last step failed: another one would tell more."""
        return self.is_alive and self._condition.is_in_doubt

    @property
    def is_alive(self) -> bool:
        """Whether it may ever be well again: False once the device has ended, or hangs in a step."""
        return self._device.is_alive and not self._condition.is_hung

    async def run(self, session: str | None, work: Work, this_round: Round | None = None) -> tuple[Any, Timings]:
        """Do the work on the worker's device, where it begins as well, and return its result.

        One piece of a session's work runs at a time. A round that is newer waits for it, in one place: a still newer
        one supersedes it. A repeat joins. Work of a session that is no round ends the session: it supersedes the round
        that waits and is not superseded. Work of no session (None) begins in the next step.

        Cancelling its last caller ends the work before its next step; it has ended once this coroutine has.

        Raises:
            WorkerClosed: after `close`.
            WorkerFailed: the device has ended by itself.
            StaleRound, StaleEpoch: a newer round of the session is running or waiting, or came while this one waited.
            InvalidRequest: the round that is running or waiting, with another body.
        """
        if self._is_closed:
            raise self._closed()
        if not self._device.is_alive:
            raise self._ended()
        context = spans.current() if spans.is_on else None
        task = Task(session, this_round, work, asyncio.get_running_loop(), context)
        if session is None or not self._is_alone(session):
            task = self._place(task)
        elif self._ends_alone(task, session):
            if self._device.is_turn_due:
                await self._device.give_turn()
            return task.result()
        future = task.join()
        try:
            return await future
        except asyncio.CancelledError:
            await self._leave(task, future)
            raise

    def _is_alone(self, session: str) -> bool:
        """Return whether work of this session may be stepped by its caller."""
        return self._device.claim(session) and session not in self._lines and self._runner.max_under_way == 1

    def _ends_alone(self, task: Task, session: str) -> bool:
        """Step a task here; return whether it has ended. One that goes on, as others do, gets a line now."""
        task.is_alone = True
        self._guarded(self._step_alone, task)
        if not task.has_ended:
            task.is_alone = False
            self._lines[session] = SessionQueue(task)
            self._device.submit(self, _nothing)
        return task.has_ended

    def _place(self, task: Task) -> Task:
        if task.session is not None:
            line = self._lines.get(task.session)
            if line is not None and not line.running.loop.is_closed():
                return line.place(task)
            self._lines[task.session] = SessionQueue(task)
        self._submit(task)
        return task

    def _submit(self, task: Task) -> None:
        self._device.submit(self, lambda: self._waiting.append(task))

    async def _leave(self, task: Task, future: asyncio.Future[tuple[Any, Timings]]) -> None:
        """Take a cancelled caller from a task; the last one ends it."""
        if not task.leave(future) or task.callers:
            return
        line = self._lines.get(task.session) if task.session is not None else None
        if line is None or not line.withdraw(task):
            task.cancelled = True
            self._device.submit(self, _nothing)
            await to_its_end(task.wait_ended())

    def _advance_line(self, session: str) -> None:
        """Begin what waits for the task of `session` that has ended."""
        line = self._lines[session]
        following = line.advance()
        while following is not None and self._is_closed:
            following.settle(None, self._closed())
            following = line.advance()
        if following is None:
            del self._lines[session]
        else:
            self._submit(following)

    def _closed(self) -> WorkerClosed:
        return WorkerClosed(f"The {self._name} worker has been closed; start a new one.")

    def _ended(self) -> WorkerFailed:
        return WorkerFailed(f"The device of the {self._name} worker has ended by itself; restart the worker.")

    async def close(self) -> None:
        """End what runs, send away what waits for it, take no more; closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._owns_device:
                await self._device.close()

    # What follows runs on the device.

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def can_step(self) -> bool:
        """Whether a step would do something now; all work may be under way elsewhere."""
        num_under_way = len(self._under_way)
        if not num_under_way or self._waiting or any(flight.is_done for flight in self._under_way.values()):
            return self.has_work
        idle = [task for task in self._running if not task.is_under_way]
        has_room = num_under_way < self._runner.max_under_way
        return bool(idle) and (has_room or any(task.cancelled for task in idle))

    def _step_alone(self, task: Task) -> None:
        self._begin(task)
        while not task.has_ended:
            self._step_of([task])
            if task.has_ended or self._device.is_turn_due:  # the clock is not asked for nothing
                break

    def _step_of(self, tasks: list[Task]) -> None:
        step = Step(tasks)
        try:
            logits = self._runner.forward(step.entries)
        except Exception as error:  # noqa: BLE001 - whatever the device raises ends these tasks, never the thread
            self._fail(step, error)
        else:
            self._end(step, logits)

    def step(self) -> None:
        """Begin what can begin, then forward all that is ready."""
        self._guarded(self._step)

    def _guarded(self, step: Callable[..., None], *arguments: Task) -> None:
        """Do a step; a mistake in it ends the tasks, not the device."""
        self._condition.begin_step()
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            _log.exception("the %s worker failed outside a forward", self._name)
            self._end_all(error)
        self._condition.end_step()

    def abandon(self) -> None:
        """End all tasks, since the device ends and nobody will step any more."""
        self._end_all(self._ended())

    def _end_all(self, error: Exception) -> None:
        tasks = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._under_way.clear()
        for task in tasks:
            task.work.close()
            self._finish(task, error=error)

    def _step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._begin(task)
        for step, flight in list(self._under_way.items()):
            if flight.is_done:
                self._land(step, flight)
        idle = [task for task in self._running if not task.is_under_way]
        ready = [task for task in idle if not self._end_if_cancelled(task)]
        if self._runner.max_under_way > 1:
            self._send_off(ready)
        elif ready:
            self._step_of(ready)

    def _begin(self, task: Task) -> None:
        task.begun_s = time.perf_counter()
        self._running[task] = None
        if task.cancelled:
            self._finish(task)
        else:
            self._advance(task, None)

    def _send_off(self, ready: list[Task]) -> None:
        """Begin a step that is computed elsewhere, if there is room for one; what is ready goes together."""
        if not ready or len(self._under_way) == self._runner.max_under_way:
            return
        step = Step(ready)
        try:
            flight = self._runner.begin(step.entries)
        except Exception as error:  # noqa: BLE001 - as in `_step_of`
            self._fail(step, error)
        else:
            self._await(step, flight)

    def _await(self, step: Step, flight: PendingForward) -> None:
        """Let a step be under way until its flight wakes the device."""
        self._under_way[step] = flight
        flight.when_done(lambda: self._device.submit(self, _nothing))

    def _land(self, step: Step, flight: PendingForward) -> None:
        """End a step that has come back, unless some of it goes out again."""
        del self._under_way[step]
        try:
            landed = flight.try_land()
        except Exception as error:  # noqa: BLE001 - as in `_step_of`
            self._fail(step, error)
            return
        if landed is None:
            self._await(step, flight)
        else:
            self._end(step, landed)

    def _end(self, step: Step, logits: list[Tensor]) -> None:
        step.end(self._name)
        for number, task in enumerate(step.tasks):
            self._advance(task, logits[number])

    def _fail(self, step: Step, error: Exception) -> None:
        for task in step.tasks:
            task.work.close()
            self._finish(task, error=_translated(error))

    def _advance(self, task: Task, logits: Tensor | None) -> None:
        try:
            task.entry = next(task.work) if logits is None else task.work.send(logits)
            task.ready_s = time.perf_counter()
        except StopIteration as stop:
            self._finish(task, result=stop.value)
        except Exception as error:  # noqa: BLE001 - the work's own error belongs to its caller
            self._finish(task, error=error)

    def _end_if_cancelled(self, task: Task) -> bool:
        if task.cancelled:
            task.work.close()
            self._finish(task)
        return task.cancelled

    def _finish(self, task: Task, *, result: Any = None, error: Exception | None = None) -> None:
        self._running.pop(task, None)
        if error is not None:
            self._condition.fail(error)
        elif task.num_forwards and not task.cancelled:
            self._condition.succeed()
        outcome = result, task.timings()
        if task.is_alone:
            task.settle(outcome, error)
            return

        def settle() -> None:
            task.settle(outcome, error)
            if task.session is not None:
                self._advance_line(task.session)

        self._device.deliver(task.loop, settle)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


def _translated(error: Exception) -> Exception:
    # A recording reports everything as a RuntimeError, and so does a failed allocation on the CPU.
    is_memory = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    if is_memory or isinstance(error, MemoryError):
        return OutOfMemory("The device ran out of memory during a forward; use a smaller --context or fewer --nodes.")
    return error
