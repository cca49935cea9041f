"""The work on one model: step = schedule, run, postprocess.

Work comes as generators that yield the Entry they want forwarded and are sent its logits, so a verify, a prefill in
chunks and a draft's levels of several sessions all meet in the same packed steps. Knows nothing of drafts or targets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context
from torch import Tensor

from specsplit.core.cancellation import to_its_end
from specsplit.core.errors import OutOfMemory, WorkerClosed
from specsplit.core.types import Timings
from specsplit.engine.device import Device, DeviceThread
from specsplit.model.plan import Entry
from specsplit.model.runner import Runner
from specsplit.telemetry import spans

_log = logging.getLogger(__name__)
Work = Generator[Entry, Tensor, Any]


@dataclass(slots=True, eq=False)
class Task:
    """One piece of work on its way through the worker; at most one of a session runs at a time."""

    session: str
    start: Callable[[], Work]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[tuple[Any, Timings]]
    ended: asyncio.Future[None]
    """Done when the worker has let go of the task, also after its caller was cancelled."""
    context: Context | None
    submitted_s: float = field(default_factory=time.perf_counter)
    work: Work | None = None
    entry: Entry | None = None
    cancelled: bool = False
    begun_s: float = 0.0
    device_ms: float = 0.0
    num_forwards: int = 0
    num_tokens: int = 0
    batch_size: int = 1

    def timings(self) -> Timings:
        now = time.perf_counter()
        return Timings(
            wall_ms=(now - self.submitted_s) * 1e3,
            queue_ms=(self.begun_s - self.submitted_s) * 1e3,
            device_ms=self.device_ms,
            num_forwards=self.num_forwards,
            num_tokens=self.num_tokens,
            batch_size=self.batch_size,
        )


class Worker:
    """Runs tasks over one model, packing all that are ready into one forward a step.

    Without a `device` it owns a thread, with `threads` for the operators; a shared one is its owner's to close.
    """

    def __init__(self, runner: Runner, *, name: str, threads: int | None = None, device: Device | None = None) -> None:
        self._runner, self._name = runner, name
        self._waiting: list[Task] = []
        self._running: dict[str, Task] = {}
        self._is_closed = False
        self._owns_device = device is None
        self._device = device or DeviceThread(name, threads)

    async def run(self, session: str, start: Callable[[], Work]) -> tuple[Any, Timings]:
        """Do the work that `start` makes (on the worker's device) and return its result.

        Cancelling the caller ends the work before its next step; it has ended once this coroutine has.

        Raises:
            WorkerClosed: after `close`.
        """
        if self._is_closed:
            raise WorkerClosed(f"The {self._name} worker has been closed; start a new one.")
        loop = asyncio.get_running_loop()
        task = Task(session, start, loop, loop.create_future(), loop.create_future(), spans.current())
        self._device.submit(self, lambda: self._waiting.append(task))
        try:
            return await task.future
        except asyncio.CancelledError:
            task.cancelled = True
            await to_its_end(task.ended)
            raise

    async def close(self) -> None:
        """Take no more work, and end the thread if it is the worker's own; closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._owns_device:
                await self._device.close()

    # What follows runs on the device.

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> None:
        """Begin what can begin, then forward all that is ready; a mistake here ends the tasks, not the device."""
        try:
            self._step()
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            _log.exception("the %s worker failed outside a forward", self._name)
            tasks = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
            for task in tasks:
                self._finish(task, error=error)

    def _step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            if task.session in self._running:
                self._waiting.append(task)  # its session's earlier task has not ended yet
            else:
                self._begin(task)
        if self._running:
            self._forward(list(self._running.values()))

    def _begin(self, task: Task) -> None:
        task.begun_s = time.perf_counter()
        self._running[task.session] = task
        if task.cancelled:
            self._finish(task)
        else:
            self._advance(task, None)

    def _forward(self, ready: list[Task]) -> None:
        ready = [task for task in ready if not self._end_if_cancelled(task)]
        if not ready:
            return
        start_s, start_ns = time.perf_counter(), time.time_ns()
        entries = [task.entry for task in ready if task.entry is not None]
        try:
            logits = self._runner.forward(entries)
        except Exception as error:  # noqa: BLE001 - whatever the device raises ends these tasks, never the thread
            for task in ready:
                self._close(task)
                self._finish(task, error=_translated(error))
            return
        elapsed_ms, end_ns = (time.perf_counter() - start_s) * 1e3, time.time_ns()
        for task, entry, rows in zip(ready, entries, logits, strict=True):
            task.device_ms += elapsed_ms
            task.num_forwards += 1
            task.num_tokens += len(entry.token_ids)
            task.batch_size = max(task.batch_size, len(entries))
            if spans.is_enabled():
                spans.record(
                    "forward",
                    task.context,
                    start_ns,
                    end_ns,
                    worker=self._name,
                    num_tokens=len(entry.token_ids),
                    base_length=entry.base_length,
                    batch_size=len(entries),
                )
            self._advance(task, rows)

    def _advance(self, task: Task, logits: Tensor | None) -> None:
        try:
            if task.work is None:
                task.work = task.start()
                task.entry = next(task.work)
            else:
                assert logits is not None
                task.entry = task.work.send(logits)
        except StopIteration as stop:
            self._finish(task, result=stop.value)
        except Exception as error:  # noqa: BLE001 - the work's own error belongs to its caller
            self._finish(task, error=error)

    def _end_if_cancelled(self, task: Task) -> bool:
        if task.cancelled:
            self._close(task)
            self._finish(task)
        return task.cancelled

    @staticmethod
    def _close(task: Task) -> None:
        if task.work is not None:
            task.work.close()

    def _finish(self, task: Task, *, result: Any = None, error: Exception | None = None) -> None:
        self._running.pop(task.session, None)
        timings = task.timings()

        def settle() -> None:
            task.ended.set_result(None)
            if task.future.done():
                return  # cancelled meanwhile: nobody is waiting for the outcome
            if error is not None:
                task.future.set_exception(error)
            else:
                task.future.set_result((result, timings))

        self._device.deliver(task.loop, settle)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


def _translated(error: Exception) -> Exception:
    # A recording reports everything as a RuntimeError, and so does a failed allocation on the CPU.
    is_memory = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    if is_memory or isinstance(error, MemoryError):
        return OutOfMemory("The device ran out of memory during a forward; use a smaller --context or fewer --nodes.")
    return error
