"""The one thread that touches a device: step = schedule, run, postprocess.

Work comes as generators that yield the Entry they want forwarded and are sent its logits, so a verify, a prefill in
chunks and a draft's levels of several sessions all meet in the same packed steps. Knows nothing of drafts or targets.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from opentelemetry.context import Context
from torch import Tensor

from specsplit.core.errors import OutOfMemory, WorkerClosed
from specsplit.core.types import Timings
from specsplit.model.plan import Entry
from specsplit.model.runner import Runner
from specsplit.telemetry import spans

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


class DeviceThread:
    """A thread that drives one or several workers in turn.

    Engines on the same CPU that take turns share one: two threads would keep two OpenMP teams, which put each other to
    sleep between any two operators.
    """

    def __init__(self, name: str, threads: int | None = None) -> None:
        self._threads = threads or torch.get_num_threads()
        self._inbox: queue.SimpleQueue[tuple[Worker, Task] | None] = queue.SimpleQueue()
        self._workers: dict[Worker, None] = {}
        """Those that have work, in the order in which they came."""
        self._is_ending = False
        self._thread = threading.Thread(target=self._loop, name=f"specsplit-{name}", daemon=True)
        self._thread.start()

    def submit(self, worker: Worker, task: Task) -> None:
        """Hand a task to its worker, on the thread."""
        self._inbox.put((worker, task))

    async def close(self) -> None:
        """End the thread once the work that it has is done."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _loop(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this per thread: engines do not disturb each other
        while self._workers or not self._is_ending:
            self._receive()
            for worker in list(self._workers):
                worker.step()
                if not worker.has_work:
                    del self._workers[worker]

    def _receive(self) -> None:
        """Take in what has arrived, waiting for it only when there is nothing to do."""
        is_idle = not self._workers
        while is_idle or not self._inbox.empty():
            message = self._inbox.get()
            is_idle = False
            if message is None:
                self._is_ending = True
            else:
                worker, task = message
                worker.accept(task)
                self._workers[worker] = None


class Worker:
    """Runs tasks over one model, packing all that are ready into one forward a step.

    Without a `thread` it owns one, with `threads` for the operators; a shared one is its owner's to close.
    """

    def __init__(
        self, runner: Runner, *, name: str, threads: int | None = None, thread: DeviceThread | None = None
    ) -> None:
        self._runner, self._name = runner, name
        self._waiting: list[Task] = []
        self._running: dict[str, Task] = {}
        self._is_closed = False
        self._owns_thread = thread is None
        self._thread = thread or DeviceThread(name, threads)

    async def run(self, session: str, start: Callable[[], Work]) -> tuple[Any, Timings]:
        """Do the work that `start` makes (on the worker's thread) and return its result.

        Cancelling the caller ends the work before its next step; it has ended once this coroutine has.

        Raises:
            WorkerClosed: after `close`.
        """
        if self._is_closed:
            raise WorkerClosed(f"The {self._name} worker has been closed; start a new one.")
        loop = asyncio.get_running_loop()
        task = Task(session, start, loop, loop.create_future(), loop.create_future(), spans.current())
        self._thread.submit(self, task)
        try:
            return await task.future
        except asyncio.CancelledError:
            task.cancelled = True
            await asyncio.wait([task.ended])
            raise

    async def close(self) -> None:
        """Take no more work, and end the thread if it is the worker's own; closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._owns_thread:
                await self._thread.close()

    # What follows runs on the thread.

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def accept(self, task: Task) -> None:
        """Queue a task."""
        self._waiting.append(task)

    def step(self) -> None:
        """Begin what can begin, then forward all that is ready at once."""
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
        del self._running[task.session]
        timings = task.timings()

        def settle() -> None:
            task.ended.set_result(None)
            if task.future.done():
                return  # cancelled meanwhile: nobody is waiting for the outcome
            if error is not None:
                task.future.set_exception(error)
            else:
                task.future.set_result((result, timings))

        with contextlib.suppress(RuntimeError):  # the caller's loop may be closed, and the caller gone with it
            task.loop.call_soon_threadsafe(settle)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


def _translated(error: Exception) -> Exception:
    # A recording reports everything as a RuntimeError, and so does a failed allocation on the CPU.
    is_memory = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    if is_memory or isinstance(error, MemoryError):
        return OutOfMemory("The device ran out of memory during a forward; use a smaller --context or fewer --nodes.")
    return error
