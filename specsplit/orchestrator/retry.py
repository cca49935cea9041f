"""How long one request keeps asking its target: retries with jitter, and the deadline that nothing outlives.

Knows no turn: what is asked again is the very same call, which the session contract makes harmless.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from specsplit.core.errors import (
    DeadlineExceeded,
    NoFreeSlot,
    Overloaded,
    SpecSplitError,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.progress import Listener, Progress, current_listener, listening
from specsplit.limits import MAX_REFUSED_S
from specsplit.orchestrator.closings import Closings
from specsplit.orchestrator.events import RequestEvents, reason_of
from specsplit.orchestrator.request import RetryPolicy

T = TypeVar("T")
RETRIED = (WorkerUnreachable, DeadlineExceeded, WorkerFailed, NoFreeSlot)
"""Errors after which the same call may still succeed."""
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.02, 1.0
_HEARD_S = 10.0
"""A target that said so lately that the request waits is not silent. Chosen: it says so every five seconds."""
_LEAST_WAIT_S = 1e-3
_LEAST_TRY_S = 5.0
"""Least limit of an attempt; of one that begins when a `retry_s` shorter than that is nearly over, `retry_s`."""


class ReplicaLost(WorkerUnreachable):
    """One of several targets cannot be reached any more, and another one that is ready is asked next."""

    is_next_new = False
    """Whether that one was not asked yet."""


class ReplicaFull(NoFreeSlot):
    """One of several targets is full, and another one that was not asked yet is asked next."""


class _OutOfTime(DeadlineExceeded):
    """The request's own deadline passed, not that of a call."""


class Retrier:
    """One request's deadline, counted from `began_s` or now, and its way of asking a target that does not answer."""

    def __init__(
        self,
        timeout_s: float | None,
        policy: RetryPolicy,
        events: RequestEvents,
        began_s: float | None = None,
        closings: Closings | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        began_s = self._loop.time() if began_s is None else began_s
        self.policy = policy
        self.deadline_s = math.inf if timeout_s is None else began_s + timeout_s
        """The loop's time at which the request is given up."""
        self.is_unbounded = timeout_s is None and not policy.can_be_silent
        """Whether nothing limits an attempt."""
        self.waits_when_full = policy.waits_when_full
        """Whether to ask a full target again; a text that was begun is worth the wait."""
        self.waits_for_streams = True
        """Whether it waits while a caller has as many streams open as one may have; else the session does without."""
        self.num_failures = 0
        self.queue_s = 0.0
        """Seconds in which the request waited for a slot: in the target's queue, or sent away for a while."""
        self._timeout_s, self._events = timeout_s, events
        self._earlier = (closings or Closings()).before()
        self._queued_s = -math.inf
        """When the target said last, in this attempt, that the request waits in its queue."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, negative after it; infinite without one."""
        return self.deadline_s - self._loop.time()

    @property
    def max_wait_s(self) -> float | None:
        """Seconds that the target may let the request wait for a slot; None without a deadline."""
        return max(_LEAST_WAIT_S, self.remaining_s) if self._timeout_s is not None else None

    def count_queue(self, queue_ms: float, seconds: float) -> float:
        """Count the time in the target's queue, out of `seconds` for the whole answer, and return its seconds."""
        queue_s = min(queue_ms / 1e3, seconds)
        self.queue_s += queue_s
        return queue_s

    async def ask(self, send: Callable[..., Awaitable[T]], *arguments: object, work_s: float = math.inf) -> T:
        """Return what `send` answers to `arguments`; it is called again while the target is away, at fault or full.

        A peer that is dead shows by its missing keepalives, but something may live and never answer. So an attempt gets
        `retry_s`, or what is left of it, and a few seconds at least; and beyond that `work_s`: an upper bound on how
        long a target that is well works on this answer, such as a whole prompt after a restart. It is infinite as long
        as nobody knows; then the call's own limit is all there is, as it is for a target on this event loop.

        Raises:
            DeadlineExceeded: the request's own deadline passed.
            LinkError, NoFreeSlot: the target's last error, after `retry_s`, where there is no deadline.
        """
        try:
            # The usual call in one process: nothing could end it early, so it needs no timer.
            if self.is_unbounded:
                return await send(*arguments)
            return await self._attempt(partial(send, *arguments), self.attempt_s(work_s))
        except RETRIED as error:
            return await self.ask_again(send, *arguments, error=error, work_s=work_s)

    def attempt_s(self, work_s: float) -> float:
        """Return the limit of an attempt, for an answer on which a worker that is well works for `work_s` at most."""
        return self._limit_s(max(self.policy.retry_s, _LEAST_TRY_S), work_s)

    def _limit_s(self, retry_s: float, work_s: float) -> float:
        return retry_s + work_s if self.policy.can_be_silent else math.inf

    async def _attempt(self, send: Callable[[], Awaitable[T]], limit_s: float = math.inf) -> T:
        """Return the answer, if it comes before the request's deadline and within `limit_s`."""
        remaining_s = self.remaining_s
        if remaining_s <= 0:
            raise _OutOfTime
        if min(remaining_s, limit_s) == math.inf:
            return await send()
        limit = asyncio.timeout(min(remaining_s, limit_s))
        try:
            with listening(self._extending(limit, limit_s)):
                async with limit:
                    return await send()
        except TimeoutError:
            # A TimeoutError from within `send` is the call's own, not our limit.
            if not limit.expired():
                raise
            if remaining_s <= limit_s or self.remaining_s <= 0:
                raise _OutOfTime from None
            raise DeadlineExceeded(f"it was reached, but gave no answer for {limit_s:.1f} s") from None

    def _extending(self, limit: asyncio.Timeout, limit_s: float) -> Listener:
        """Return what lets the limit of an attempt count anew with every progress: the target is not silent."""
        outer = current_listener()

        def extend(progress: Progress) -> None:
            # A stream may report after the attempt that opened it, whose limit cannot be moved any more.
            with suppress(RuntimeError):
                limit.reschedule(min(self.deadline_s, self._loop.time() + limit_s))
            if outer is not None:
                outer(progress)

        return extend

    async def ask_again(
        self,
        send: Callable[..., Awaitable[T]],
        *arguments: object,
        error: SpecSplitError,
        work_s: float = math.inf,
    ) -> T:
        """Do the same after a first attempt that ended with `error`; raises what `ask` raises."""
        if isinstance(error, Overloaded) and error.limit != "tokens" and await self._earlier.wait(self.remaining_s):
            # What was lacking may be had by now: the session of a request that has its answer was being closed.
            self._count_failure(error)
            try:
                return await self._attempt(partial(send, *arguments), self.attempt_s(work_s))
            except RETRIED as next_error:
                error = next_error
        return await self._retry(partial(send, *arguments), error, work_s)

    async def _retry(self, again: Callable[[], Awaitable[T]], error: SpecSplitError, work_s: float) -> T:
        """Ask again and again after an attempt that ended with `error`.

        The time for which a target that refuses says to wait does not count as `retry_s`, up to MAX_REFUSED_S.
        Nor does that of an attempt which lasted longer, until its target was lost, if another replica is ready, or
        until the target sent it away from its queue, in which it keeps the place. Full or lost replicas are asked once.

        Raises:
            Overloaded: as soon as it comes, unless it `waits_when_full`, or where it does not wait for streams.
        """
        began_s = self._loop.time()
        end_s = self.deadline_s if self._timeout_s is not None else began_s + self.policy.retry_s
        most_s = min(self.deadline_s, max(end_s, began_s + MAX_REFUSED_S))
        pause_s, is_next_new = _FIRST_PAUSE_S, True
        while True:
            is_next_new = is_next_new and _is_next_new(error) and self.remaining_s > 0
            if isinstance(error, Overloaded) and not self._waits_for(error):
                raise error
            self._count_failure(error)
            if isinstance(error, Overloaded):
                # Places and a caller's tokens come back with time, and the target says when: no attempt is in vain.
                end_s = min(end_s + error.retry_after_s, most_s)
            left_s = end_s - self._loop.time()  # the pause never outlives it, so the last attempt begins in time
            if left_s <= 0 and not is_next_new:
                raise self._given_up(error, self._loop.time() - began_s)
            if isinstance(error, Overloaded):
                # The worker spreads those whom it refuses over time, so there is nothing to jitter or to double.
                wait_s = min(error.retry_after_s, left_s)
                self.queue_s += wait_s
                if (listener := current_listener()) is not None:
                    listener(Progress(retry_after_s=wait_s))
            else:
                wait_s = max(0.0, min(self.policy.rng.uniform(0, pause_s), left_s))
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            await asyncio.sleep(wait_s)
            tried_s, self._queued_s = self._loop.time(), -math.inf
            left_s = max(end_s - tried_s, min(_LEAST_TRY_S, math.inf if is_next_new else self.policy.retry_s))
            try:
                with listening(self._noting(current_listener())):
                    return await self._attempt(again, self._limit_s(left_s, work_s))
            except _OutOfTime:
                continue
            except RETRIED as next_error:
                error = next_error
            now_s = self._loop.time()
            was_queued = isinstance(error, DeadlineExceeded) and now_s - self._queued_s < _HEARD_S
            was_lost = isinstance(error, ReplicaLost) and now_s - tried_s > self.policy.retry_s
            if was_lost or was_queued:
                end_s = max(end_s, min(now_s + self.policy.retry_s, most_s))

    def _count_failure(self, error: SpecSplitError) -> None:
        self.num_failures += 1
        self._events.degrade("target", reason_of(error))

    def _noting(self, outer: Listener | None) -> Listener:
        """Return what notes when the target says that the request waits in its queue."""

        def note(progress: Progress) -> None:
            if progress.queued:
                self._queued_s = self._loop.time()
            if outer is not None:
                outer(progress)

        return note

    def _waits_for(self, error: Overloaded) -> bool:
        return self.waits_when_full and (error.limit != "streams" or self.waits_for_streams)

    def _given_up(self, error: SpecSplitError, tried_s: float) -> SpecSplitError:
        """Return the error to be raised, in words that say who, for how long, and why."""
        if self._loop.time() >= self.deadline_s:
            limit = f"The request was not finished within its {_rounded(self._timeout_s or 0.0):g} s"
            if isinstance(error, _OutOfTime):
                return DeadlineExceeded(f"{limit}: the target was still at work, or silent; allow it more.")
            return DeadlineExceeded(f"{limit}: the target could not be used for {tried_s:.1f} s ({_text(error)}).")
        kind = next(kind for kind in RETRIED if isinstance(error, kind))
        return kind(f"The target could not be used and was asked again for {tried_s:.1f} s ({_text(error)}).")


def _is_next_new(error: SpecSplitError) -> bool:
    return isinstance(error, ReplicaFull) or (isinstance(error, ReplicaLost) and error.is_next_new)


def _rounded(seconds: float) -> float:
    """Round seconds for a message; connecting may have used up a part of them."""
    return round(seconds, 1 if seconds >= 1 else 3)


def _text(error: SpecSplitError) -> str:
    return str(error).rstrip(".")
