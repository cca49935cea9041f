"""What drives workers step by step: a thread of its own, or the caller's event loop.

Engines on the same CPU that take turns share one: two threads would keep two OpenMP teams, which put each other to
sleep between any two operators. Knows no models, and of sessions only whether they are one.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch


class Steppable(Protocol):
    """What a device drives: it has work, or it has none and is left alone."""

    @property
    def has_work(self) -> bool: ...

    @property
    def can_step(self) -> bool:
        """Whether there is something to do now, and not only to be waited for."""
        ...

    def step(self) -> None: ...

    def abandon(self) -> None:
        """End what it has: there will be no step any more."""
        ...


class Executor(Protocol):
    """Runs everything that touches a model, one piece at a time."""

    @property
    def is_alive(self) -> bool:
        """Whether it still takes work; one that has ended, by itself or at `close`, never does again."""
        ...

    def submit(self, worker: Steppable, accept: Callable[[], None]) -> None:
        """Call `accept`, then step `worker` until it has no work left.

        From the event loop; of a DeviceThread also from any other thread.
        """
        ...

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        """Call `settle` on the event loop; from within a step only."""
        ...

    def claim(self, session: str) -> bool:
        """Take note that work of `session` comes; return whether its caller may step it here and now.

        That is where a step would have nothing else to pack it with.
        """
        ...

    @property
    def is_turn_due(self) -> bool:
        """Whether the event loop has waited long enough for a turn; only where callers may step."""
        ...

    async def give_turn(self) -> None:
        """Let the event loop have its turn."""
        ...

    async def close(self) -> None:
        """End once the work at hand is done."""
        ...


def compute_with(num_threads: int) -> None:
    """Let the calling thread compute with so many of its own, whatever other threads of the process are told.

    With its first parallel operator, or question, a thread takes the number that was set last anywhere; only what is
    set after that stays its own. So engines would disturb each other's speed, and the last digits of their logits.
    """
    torch.get_num_threads()
    torch.set_num_threads(num_threads)


class ThreadExecutor:
    """A thread of its own: the event loop stays free during a forward, as a server's has to."""

    def __init__(self, name: str, threads: int | None = None) -> None:
        self._threads = threads or torch.get_num_threads()
        self._inbox: queue.SimpleQueue[tuple[Steppable, Callable[[], None]] | None] = queue.SimpleQueue()
        self._workers: dict[Steppable, None] = {}
        """Those that have work, in the order in which they came."""
        self._is_ending = False
        self._has_ended = False
        self._abandoning = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"specsplit-{name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return not self._has_ended

    def submit(self, worker: Steppable, accept: Callable[[], None]) -> None:
        self._inbox.put((worker, accept))
        if self._has_ended:  # meanwhile, so that nobody takes it out
            self._abandon()

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop may be closed, and the caller gone with it
            loop.call_soon_threadsafe(settle)

    def claim(self, session: str) -> bool:
        """Return False: a caller is on the event loop, and never here."""
        return False

    @property
    def is_turn_due(self) -> bool:
        return False

    async def give_turn(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._drive()
        finally:  # nothing that a step raises on purpose leads here before the end
            self._has_ended = True
            self._abandon()

    def _drive(self) -> None:
        compute_with(self._threads)
        while self._workers or not self._is_ending:
            self._receive()
            for worker in list(self._workers):
                if worker.can_step:
                    worker.step()
                if not worker.has_work:
                    del self._workers[worker]

    def _abandon(self) -> None:
        """Tell everybody that there will be no step any more."""
        with self._abandoning:
            workers, self._workers = self._workers, {}
            while not self._inbox.empty():
                message = self._inbox.get()
                if message is not None:
                    worker, accept = message
                    accept()
                    workers[worker] = None
            for worker in workers:
                worker.abandon()

    def _receive(self) -> None:
        """Take in what has arrived, waiting for it only when there is nothing to do."""
        is_idle = not any(worker.can_step for worker in self._workers)
        while is_idle or not self._inbox.empty():
            message = self._inbox.get()
            is_idle = False
            if message is None:
                self._is_ending = True
            else:
                worker, accept = message
                accept()
                self._workers[worker] = None


_TURN_S = 0.004
"""After how long a step gives the loop its turn; the step itself takes what it takes."""


class LoopExecutor:
    """The caller's event loop itself: nothing to hand over and nobody to wake.

    In a turn of the loop it steps until somebody is to hear of a result, or `_TURN_S` are over. A session that is alone
    steps by itself, without a turn for every step.

    A hand-over to a thread and back costs a quarter of a millisecond, four of them a round. The price is that the loop
    waits while a forward runs, so this is for a process that generates and does little else. See docs/adr/0003.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._workers: dict[Steppable, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self._has_delivered = False
        self._turn_end_s = 0.0
        """From when on the loop is due a turn."""
        self._last_session: str | None = None
        self._idle: asyncio.Event | None = None
        """For whoever closes it while there is work."""

    @property
    def is_alive(self) -> bool:
        return True

    def submit(self, worker: Steppable, accept: Callable[[], None]) -> None:
        accept()
        self._workers[worker] = None
        self._schedule()

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        self._has_delivered = True
        settle()

    def claim(self, session: str) -> bool:
        is_last, self._last_session = session == self._last_session, session
        return is_last and not self._workers  # of sessions in turns, a step takes all

    @property
    def is_turn_due(self) -> bool:
        return time.perf_counter() >= self._turn_end_s

    async def give_turn(self) -> None:
        await asyncio.sleep(0)
        self._turn_end_s = time.perf_counter() + _TURN_S

    async def close(self) -> None:
        if self._workers:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    def _schedule(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._threads is not None:
                compute_with(self._threads)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._is_scheduled = self._has_delivered = False
        end_s = self._turn_end_s = time.perf_counter() + _TURN_S
        while self._workers:
            for worker in list(self._workers):
                worker.step()
                if not worker.has_work:
                    del self._workers[worker]
            if self._has_delivered or time.perf_counter() >= end_s:
                break
        if self._workers:
            self._schedule()
        elif self._idle is not None:
            self._idle.set()
            self._idle = None
