"""The chunks of one request that runs on the loop of another thread, for a thread that waits. Knows no workers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator
from types import TracebackType

from specsplit.assembly.loop_thread import CancellableTask, FinishedTask, LoopThread
from specsplit.core.errors import InvalidRequest
from specsplit.orchestrator.request import Chunk

Deliver = Callable[[Chunk | FinishedTask], None]


class ChunkStream(Generator[Chunk, None, None]):
    """The answer of one request; it ends with the request's error if that fails. Closing it ends the request.

    A generator's `finally` would not do: the collector may run it on the loop's own thread, where waiting for the
    request would wait for itself. So `close` cancels and waits, and finalising only cancels.
    """

    def __init__(self, start: Callable[[Deliver], CancellableTask]) -> None:
        """Make a stream whose request begins when `begin` is called or the first chunk is asked for."""
        self._start = start
        self._inbox: queue.SimpleQueue[Chunk | FinishedTask] = queue.SimpleQueue()
        self._running: CancellableTask | None = None
        self._has_ended = False

    def begin(self) -> CancellableTask:
        """Begin the request if it has not begun, and return its task."""
        if self._running is None:
            self._running = self._start(self._inbox.put)
        return self._running

    def send(self, value: None, /) -> Chunk:
        """Return the next chunk."""
        if self._has_ended:
            raise StopIteration
        try:
            item = self._receive(self.begin())
        except BaseException:
            self.close()
            raise
        if isinstance(item, Chunk):
            return item
        was_closed, self._has_ended, self._running = self._has_ended, True, None
        if not was_closed:
            raise_failure(item)
        raise StopIteration

    def throw(
        self, typ: type[BaseException] | BaseException, val: object = None, tb: TracebackType | None = None, /
    ) -> Chunk:
        """End the request and raise the error."""
        self.close()
        raise val if isinstance(val, BaseException) else typ

    def close(self) -> None:
        """End the request, and return once it has freed its slot."""
        self._has_ended = True
        running = self._running
        if running is not None and running.thread.is_here:
            running.cancel()
            # The request has freed its slots only when its task has ended, so the next one may count on them.
            while isinstance(self._receive(running), Chunk):
                pass

    def __del__(self) -> None:
        if self._running is not None and self._running.thread.is_here:
            self._running.cancel()

    def _receive(self, running: CancellableTask) -> Chunk | FinishedTask:
        refuse_elsewhere(running.thread)
        item = self._inbox.get()
        if not isinstance(item, Chunk):
            self._inbox.put(item)  # the end is there for whoever else waits, in `close` on another thread
        return item


def refuse_elsewhere(thread: LoopThread) -> None:
    """Refuse to wait for a thread that this process does not have, since it was forked from the one that has."""
    if not thread.is_here:
        raise InvalidRequest("This pipeline was made in another process, before a fork; make a new one here.")


def raise_failure(task: FinishedTask) -> None:
    """Raise the error that ended a request early, if there is one."""
    if task.cancelled():
        raise InvalidRequest("The pipeline was closed before this request came to its end.")
    task.result()
