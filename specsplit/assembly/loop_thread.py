"""An event loop in a thread of its own, which runs tasks for threads and loops elsewhere. Knows nothing of requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from specsplit.engine.event_loop import new_event_loop

T = TypeVar("T")
FinishedTask = asyncio.Task[None]
_log = logging.getLogger(__name__)


class LoopThread:
    """A running event loop; `end` it once, or `end_soon`."""

    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._tasks: set[FinishedTask] = set()
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the thread is in this process: a fork has the object alone, and would wait for the loop for ever."""
        return os.getpid() == self._process_id

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` on the loop; the future has what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin(
        self, work: Callable[[], Coroutine[Any, Any, None]], on_end: Callable[[FinishedTask], None]
    ) -> CancellableTask:
        """Begin a task that can be cancelled from any thread; `on_end` always gets it once it has finished."""
        return CancellableTask(self, self._loop, self._tasks, work, on_end)

    async def cancel_tasks(self) -> None:
        """Cancel what was begun and wait until all of it has ended; to be run on the loop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self) -> None:
        """End the thread after every task on its loop, so that cancelled ones still free what they hold."""
        self.submit(_wind_up()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def end_soon(self, first: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `first`, and end the thread as `end` does, without waiting for it; also on the loop or in a finalizer."""
        _ending.add(self)
        self.submit(self._end_after(first))

    def join(self) -> None:
        """Wait for the end of a thread that is to end soon."""
        self._thread.join()

    async def _end_after(self, first: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await first()
        except Exception:  # noqa: BLE001 - nobody waits for this, and the thread is to end all the same
            _log.exception("what a pipeline held was not freed in good order")
        await _wind_up()
        self._loop.stop()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            _ending.discard(self)


class CancellableTask:
    """A task on the loop of another thread."""

    def __init__(
        self,
        thread: LoopThread,
        loop: asyncio.AbstractEventLoop,
        tasks: set[FinishedTask],
        work: Callable[[], Coroutine[Any, Any, None]],
        on_end: Callable[[FinishedTask], None],
    ) -> None:
        self.thread = thread
        self._loop, self._tasks, self._work, self._on_end = loop, tasks, work, on_end
        self._task: FinishedTask | None = None
        # The loop takes calls in order: `_cancel` runs after `_begin`, so it finds the task even before its first step.
        loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work())
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)
        self._task.add_done_callback(self._on_end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def cancel(self) -> None:
        """Cancel the task if it has not ended; may be called from any thread."""
        # A closed loop raises, and ending it has ended every task.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)


_ending: set[LoopThread] = set()
"""Threads that nobody waits for, but the interpreter's end."""


def join_ending() -> None:
    """Wait for every thread of this process that is to end soon."""
    for thread in list(_ending):
        if thread.is_here:
            thread.join()


async def _wind_up() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    # As the interpreter ends its pools have ended, and from Python 3.12 on no thread begins that would wait for them.
    with contextlib.suppress(RuntimeError):
        await loop.shutdown_default_executor()
