"""An executor drives schedulers step by step: on a thread of its own, or on the caller's event loop.

Engines on the same CPU that take turns share one: two threads would keep two OpenMP teams, which put each other to
sleep between any two operators. Knows no models, and of sessions only their keys.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol

import torch

from specsplit.core.errors import ModelDamaged, OutOfMemory, SpecSplitError, WorkerFailed
from specsplit.model.freed_memory import FreedMemory
from specsplit.model.memory import is_exhausted
from specsplit.model.threads import compute_with, end_team

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which a device is not well: fewer may be one odd request."""
HUNG_S = 600.0
"""A step that takes longer outlives every call that could wait for it."""
TEAM_IDLE_S = 0.1
"""Seconds without work after which an executor's OpenMP team ends: while it exists, those of others are slow."""


def nothing() -> None:
    """Accept nothing: an executor only has to look at its scheduler again."""


def ended(name: str) -> WorkerFailed:
    """Return the error of work that nobody will step any more."""
    return WorkerFailed(f"The device of the {name} worker has ended by itself; restart the worker.")


class Steppable(Protocol):
    """Work that an executor drives; without work it is left alone."""

    @property
    def has_work(self) -> bool: ...

    @property
    def can_step(self) -> bool:
        """Whether there is something to do now, and not only to be waited for."""
        ...

    @property
    def wait_s(self) -> float:
        """Seconds for which a step that could begin should wait for more work; 0 for none."""
        ...

    def step(self) -> None: ...

    def abandon(self) -> None:
        """End all work: there will be no step any more."""
        ...


class LoopTurn(Protocol):
    """Lets a caller on the event loop run steps by itself, for as long as the loop can do without a turn."""

    def is_over(self, within_s: float = 0.0) -> bool:
        """Return whether the event loop has waited long enough for its turn, or will have within so many seconds."""
        ...

    async def yield_to_loop(self) -> None:
        """Let the event loop have its turn; afterwards another one begins."""
        ...


class Executor(Protocol):
    """Runs everything that touches a model, one piece at a time."""

    can_wait: bool
    """Whether it waits for more work where a scheduler says that this pays."""

    @property
    def is_alive(self) -> bool:
        """Whether it still takes work; one that has ended, by itself or at `close`, never does again."""
        ...

    def submit(self, scheduler: Steppable, accept: Callable[[], None]) -> None:
        """Call `accept`, then step `scheduler` until it has no work left.

        It is called on the event loop; a ThreadExecutor allows any other thread as well.
        """
        ...

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        """Call `settle` on the event loop; from within a step only."""
        ...

    def try_run_inline(self, session: str) -> LoopTurn | None:
        """Return the turn in which the caller may step work of `session` here and now, None if it must submit it.

        A turn is given only if a step could not pack this work with any other.
        """
        ...

    async def close(self) -> None:
        """End once the work at hand is done."""
        ...


class ThreadExecutor:
    """A thread of its own: the event loop stays free during a forward, as a server's has to."""

    can_wait = True

    def __init__(self, name: str, threads: int | None = None) -> None:
        self.is_alive = True
        self._threads = threads or torch.get_num_threads()
        self._inbox: queue.SimpleQueue[tuple[Steppable, Callable[[], None]] | None] = queue.SimpleQueue()
        self._busy: dict[Steppable, None] = {}
        """Schedulers that have work, in the order in which they came."""
        self._is_ending = False
        self._freed = FreedMemory()
        self._abandoning = threading.Lock()
        self._end: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=f"specsplit-{name}", daemon=True)
        self._thread.start()

    def submit(self, scheduler: Steppable, accept: Callable[[], None]) -> None:
        self._inbox.put((scheduler, accept))
        # The thread may have ended between the caller's look at `is_alive` and this put: then nobody else takes it out.
        if not self.is_alive:
            self._abandon()

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop may be closed, and the caller gone with it
            loop.call_soon_threadsafe(settle)

    def try_run_inline(self, session: str) -> None:
        """Return None: a caller is on the event loop, and never on this thread."""

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.shield(asyncio.wrap_future(self._end))  # by no pool, which takes no work as the interpreter ends
        self._thread.join()

    def _run(self) -> None:
        try:
            self._drive()
        finally:  # nothing that a step raises on purpose leads here before the end
            self.is_alive = False
            try:
                self._abandon()
            finally:
                self._end.set_result(None)

    def _drive(self) -> None:
        compute_with(self._threads)
        while self._busy or not self._is_ending:
            self._receive()
            # A scheduler that waits for forwards computed elsewhere keeps its place without a step.
            for scheduler in list(self._busy):
                if scheduler.can_step:
                    scheduler.step()
                if not scheduler.has_work:
                    del self._busy[scheduler]
            self._freed.look_between_steps()

    def _wait_s(self) -> float | None:
        """Return how long to wait for more work: 0 if there is some, None if the next step should begin."""
        if not self._inbox.empty():
            return 0.0
        # Where schedulers share the thread, none waits.
        wait_s = next(iter(self._busy)).wait_s if len(self._busy) == 1 else 0.0
        return wait_s if wait_s > 0 else None

    def _abandon(self) -> None:
        """Let every scheduler end its work, since there will be no step any more."""
        # Both the ending thread and a late submitter come here; whoever is second finds nothing left.
        with self._abandoning:
            schedulers, self._busy = self._busy, {}
            while not self._inbox.empty():
                if (message := self._inbox.get()) is not None:
                    scheduler, accept = message
                    accept()
                    schedulers[scheduler] = None
            for scheduler in schedulers:
                scheduler.abandon()

    def _receive(self) -> None:
        """Take in what has arrived, waiting for it only if there is nothing to do, or if company pays."""
        wait_s = self._wait_s() if any(scheduler.can_step for scheduler in self._busy) else math.inf
        while wait_s is not None:
            try:
                message = self._inbox.get(timeout=wait_s) if wait_s < math.inf else self._next_after_pause()
            except queue.Empty:
                return
            if message is None:
                self._is_ending = True
            else:
                scheduler, accept = message
                accept()
                self._busy[scheduler] = None
            wait_s = self._wait_s()

    def _next_after_pause(self) -> tuple[Steppable, Callable[[], None]] | None:
        """Wait for what comes next; meanwhile end the team, then give back the memory that work has freed."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=TEAM_IDLE_S)
        end_team()
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=self._freed.wait_s)
        self._freed.look_in_pause()
        return self._inbox.get()


TURN_S = 0.004
"""Seconds of steps after which the event loop gets its turn; a single step takes what it takes."""
MOST_TURNS = 24
"""Turns of the event loop before a step, for those who got a result and have not come back.

Chosen: a request that has ended needs a dozen until the next one of its client is here, which take less than a tenth of
a millisecond together. Measured: with one turn each, sixteen clients missed eight steps of twenty between two requests.
"""


class LoopExecutor:
    """The caller's event loop itself: nothing to hand over and nobody to wake.

    In a turn of the loop it steps until a result has to be delivered, or `TURN_S` are over. Then those who got one have
    some turns to come back with more work. A session that is alone steps by itself, without a turn for every step.

    A hand-over to a thread and back costs a quarter of a millisecond, four of them a round. The price is that the loop
    waits while a forward runs, so this is for a process that generates and does little else. See docs/adr/0003.
    """

    can_wait = False  # whoever got a result has its turn before the next step

    def __init__(self, threads: int | None = None) -> None:
        self.is_alive = True
        self._threads = threads
        self._busy: dict[Steppable, None] = {}
        """Schedulers that have work, in the order in which they came."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self._num_away = self._num_turns = 0
        """Results delivered since the last step less the work that came, and the turns that the loop had since then."""
        self._turn_end_s = 0.0
        self._last_session: str | None = None
        self._has_worked = False
        """Whether anything was computed since the last look at the team."""
        self._team_timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None
        """Set when there is no work left; made by whoever closes it before."""

    def submit(self, scheduler: Steppable, accept: Callable[[], None]) -> None:
        accept()
        self._busy[scheduler] = None
        self._num_away -= 1
        self._schedule()

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        self._num_away += 1
        settle()

    def try_run_inline(self, session: str) -> LoopExecutor | None:
        # Sessions that alternate are about to meet, so they go through a common step, which packs all of them.
        is_last, self._last_session, self._has_worked = session == self._last_session, session, True
        if self._team_timer is None and self._threads != 1:  # asked here, for a call less in every round
            self._watch_team()
        return self if is_last and not self._busy else None

    def is_over(self, within_s: float = 0.0) -> bool:
        """Return whether the event loop has waited long enough for its turn, or will have within so many seconds."""
        return time.perf_counter() >= self._turn_end_s - within_s

    async def yield_to_loop(self) -> None:
        """Let the event loop have its turn; afterwards another one begins."""
        await asyncio.sleep(0)
        self._turn_end_s = time.perf_counter() + TURN_S

    async def close(self) -> None:
        if self._busy:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()
        if self._team_timer is not None:
            self._team_timer.cancel()
            end_team()

    def _watch_team(self) -> None:
        """Look at the loop's team after a while, since something is about to be computed."""
        if self._loop is not None:
            self._team_timer = self._loop.call_later(TEAM_IDLE_S, self._end_idle_team)

    def _end_idle_team(self) -> None:
        """End the loop's team if nothing was computed since the last look."""
        assert self._loop is not None, "something was computed"
        if self._has_worked or self._busy:
            self._has_worked, self._team_timer = False, self._loop.call_later(TEAM_IDLE_S, self._end_idle_team)
        else:
            self._team_timer = None
            end_team()

    def _schedule(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._threads is not None:
                compute_with(self._threads)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        # A step that begins without somebody who is about to come back costs him as long as it takes.
        if self._num_away > 0 and self._num_turns < MOST_TURNS and self._loop is not None:
            self._num_turns += 1
            self._loop.call_soon(self._step)
            return
        self._is_scheduled, self._has_worked, self._num_away, self._num_turns = False, True, 0, 0
        if self._team_timer is None and self._threads != 1:
            self._watch_team()
        end_s = self._turn_end_s = time.perf_counter() + TURN_S
        # A scheduler that waits for forwards computed elsewhere keeps its place without a step.
        while ready := [scheduler for scheduler in self._busy if scheduler.can_step]:
            for scheduler in ready:
                scheduler.step()
                if not scheduler.has_work:
                    del self._busy[scheduler]
            # Whoever got a result may bring new work, which the next step should not have to go without.
            if self._num_away > 0 or time.perf_counter() >= end_s:
                break
        if any(scheduler.can_step for scheduler in self._busy):
            self._schedule()
        elif not self._busy and self._idle is not None:
            self._idle.set()
            self._idle = None


class DeviceHealth:
    """Whether a device still computes, judged by its steps in a row; the executor's side writes, anyone may ask."""

    def __init__(self) -> None:
        self.step_began_s: float | None = None
        """When the step that runs now began, on the monotonic clock; None between steps."""
        self.has_succeeded = False
        """Set when work that had a forward comes to its result in this step."""
        self._has_failed = False
        self._num_failed = 0

    @property
    def is_well(self) -> bool:
        """Whether the last steps did not all fail; one that succeeds makes it so again."""
        return self._num_failed < MAX_FAILED_STEPS and not self.is_hung

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last step failed."""
        return self._num_failed > 0

    @property
    def is_hung(self) -> bool:
        """Whether a step has been running for longer than any call lasts."""
        began_s = self.step_began_s  # read once: another thread may end the step between two reads
        return began_s is not None and time.monotonic() - began_s > HUNG_S

    def fail(self, error: Exception) -> None:
        """Count an error in this step if it says something about the device, and not only about a request."""
        self._has_failed |= not isinstance(error, SpecSplitError) or isinstance(error, OutOfMemory | ModelDamaged)

    @contextlib.contextmanager
    def judging(self) -> Generator[None]:
        """Judge the block as a step of its own."""
        self.step_began_s = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again, as what it means
            self.fail(error)
            raise translated(error) from (error if is_exhausted(error) else error.__cause__)
        finally:
            self.end_step()

    def end_step(self) -> None:
        """Judge the step: one success outweighs its failures, and with neither of them it says nothing."""
        if self.has_succeeded:
            self._num_failed = 0
        elif self._has_failed:
            self._num_failed += 1
        self.has_succeeded = self._has_failed = False
        self.step_began_s = None


def translated(error: Exception) -> Exception:
    """Return what a device's error means; most are themselves."""
    if is_exhausted(error):
        return OutOfMemory("The device ran out of memory during a forward; use a smaller --context or fewer --nodes.")
    return error
