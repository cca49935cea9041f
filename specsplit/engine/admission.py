"""The queue before a worker's slots: openings of sessions wait here in order, and cost neither a slot nor a thread.

    [ first: tries for a slot | second | ... | the last one that may wait ]    everybody else is refused with a time

Knows neither turns nor models; on the event loop only, but for `slot_freed`.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from specsplit.core.errors import DeadlineExceeded, Overloaded, SpecSplitError, StaleRound, WorkerClosed
from specsplit.core.progress import Listener, Progress, current_listener
from specsplit.core.record import record
from specsplit.limits import MAX_WAIT_S, MIN_RETRY_S
from specsplit.telemetry.session_log import log_session

AGE_S = 10.0
"""Seconds of waiting that outweigh one level of priority, so that nobody starves."""
_TRY_S = 0.25
"""Period at which the first one tries again: a session may have become old enough to lose its slot."""
_REPORT_S = 5.0
"""Longest time without a report to somebody who waits, who could not tell silence from a dead worker."""
_NEAR_FRONT = 16
"""So many behind a change hear of it at once; those further back within _REPORT_S: each slot would wake hundreds."""
_RATE_S, _RATE_SLOTS = 60.0, 32
"""How far back, in seconds and in slots, the rate is measured at which slots become free."""
_DEFAULT_RETRY_S, _MOST_RETRY_S = 0.5, 30.0
_KEPT_S = 10.0
"""Seconds for which whoever has waited for as long as one call may can come again to its place in the queue."""


class WaitedInVain(DeadlineExceeded):
    """No slot became free in the time of an opening."""


class WaitedLong(WaitedInVain):
    """One call may wait no longer, but its request may: its place is kept for a call that follows soon."""


def aged(since_s: float, priority: int) -> float:
    """Return the sort key of somebody who has waited since then: earlier by AGE_S for each level of priority."""
    # It never changes. Every later arrival, whatever its priority, ranks behind in the end, so nobody starves.
    return since_s - AGE_S * priority


@record
class Opening:
    """A call that needs a slot: whose it is, and how urgent. The higher of two priorities goes first.

    `priority` None is background work, which waits behind all others, but tries for a slot while it `overtakes` them.
    `max_wait_s` None is up to the worker. `since_s` is when a session was opened first that lost its slot to older
    ones; its place is that of then.
    """

    session: str
    caller: str = ""
    priority: int | None = 0
    max_wait_s: float | None = None
    since_s: float | None = None
    request_id: str = ""
    overtakes: Callable[[], bool] = lambda: False

    def rank(self, arrived_s: float) -> tuple[bool, float]:
        """Return the sort key of an opening that came then: background work comes last, others by age."""
        since_s = arrived_s if self.since_s is None else self.since_s
        return self.priority is None, aged(since_s, self.priority or 0)

    @property
    def limit_s(self) -> float:
        """Seconds that one call may wait."""
        return MAX_WAIT_S if self.max_wait_s is None else min(self.max_wait_s, MAX_WAIT_S)


@dataclass(slots=True, eq=False)
class _Waiter:
    """One opening in the queue."""

    opening: Opening
    arrived_s: float
    number: int
    listener: Listener | None
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if it became the first, moved up, was sent away, or, for the first, if a slot has become free."""
    error: SpecSplitError | None = None

    def __lt__(self, other: _Waiter) -> bool:
        return self.rank < other.rank

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Sort key, which never changes."""
        return *self.opening.rank(self.arrived_s), self.number


class FreedRate:
    """How fast slots become free, and when the next of those who were refused should come back."""

    def __init__(self) -> None:
        self._freed_s: deque[float] = deque(maxlen=_RATE_SLOTS)
        self._promised_s = 0.0

    def observe(self, now_s: float) -> None:
        """Count a slot that became free while somebody waited for it."""
        self._freed_s.append(now_s)

    def rest(self) -> None:
        """Forget the pace, since slots are free: how fast they become so is up to who takes them."""
        self._freed_s.clear()

    def forget_promises(self) -> None:
        """Let the next refused caller come back as if nobody had been refused before."""
        self._promised_s = 0.0

    def retry_after_s(self, now_s: float) -> float:
        """Return after how many seconds one more caller should come back; each call promises a later moment."""
        while self._freed_s and self._freed_s[0] < now_s - _RATE_S:
            self._freed_s.popleft()
        # Every slot that becomes free makes one place in the queue; callers that come at that pace find one each.
        per_slot_s = _DEFAULT_RETRY_S
        if len(self._freed_s) > 1:
            per_slot_s = (now_s - self._freed_s[0]) / len(self._freed_s)
        self._promised_s = max(now_s, self._promised_s) + per_slot_s
        if self._promised_s > now_s + _MOST_RETRY_S:  # those beyond it come one after the other, too, and not at once
            self._promised_s = now_s + _MOST_RETRY_S / 2
        return max(MIN_RETRY_S, self._promised_s - now_s)


class AdmissionQueue:
    """Lets at most `max_waiting` openings wait for a slot, first come first served within a priority.

    A named caller, and background work, may have half of the places.
    """

    def __init__(self, max_waiting: int = 0) -> None:
        self.max_waiting = max_waiting
        self.num_refused = 0
        """Callers that were sent away with a time."""
        self._waiters: list[_Waiter] = []
        self._kept: dict[str, tuple[_Waiter, float]] = {}
        """Sessions that have waited for as long as one call may, by key, and until when their places are theirs."""
        self._rate = FreedRate()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def is_next(self, opening: Opening) -> bool:
        """Whether an opening that comes now goes before all who wait."""
        rank = opening.rank(asyncio.get_running_loop().time())
        return not self._waiters or rank < self._waiters[0].rank[:2]

    @property
    def sessions(self) -> set[str]:
        """The sessions that wait."""
        return {waiter.opening.session for waiter in self._waiters}

    def slot_freed(self) -> None:
        """Let the first one try, since a slot has become free; any thread may call this."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits on it
                self._loop.call_soon_threadsafe(self._take_note)

    def overloaded(self, sentence: str) -> Overloaded:
        """Return the refusal of one caller, with the time after which it should come back."""
        self.num_refused += 1
        self._loop = asyncio.get_running_loop()
        retry_after_s = self._rate.retry_after_s(self._loop.time())
        return Overloaded(f"{sentence.rstrip('.')} (in {retry_after_s:.2g} s).", retry_after_s)

    def has_place_for(self, opening: Opening) -> bool:
        """Whether an opening may wait at all: there is a queue, or it is of a session that was let in before."""
        return opening.max_wait_s != 0 and (self.max_waiting > 0 or opening.since_s is not None)

    async def wait(
        self, opening: Opening, try_take: Callable[[], Awaitable[bool]], *, arrived_s: float | None = None
    ) -> float:
        """Wait until the opening is the first and `try_take` has got it a slot; return the seconds waited.

        Progress is reported to the caller's listener. A later call for the same session takes this one's place. If the
        caller is cancelled it leaves at once. `arrived_s` is when the opening came, if it did not wait from then on.

        Raises:
            Overloaded: no place is left.
            WaitedInVain: `max_wait_s` has passed since it came.
            WaitedLong: MAX_WAIT_S has passed since this call.
            StaleRound: a later call has taken the place, or the session has been closed.
        """
        self._loop = loop = asyncio.get_running_loop()
        began_s = loop.time()
        arrived_s = began_s if arrived_s is None else arrived_s
        end_s = began_s + MAX_WAIT_S
        late: type[WaitedInVain] = WaitedLong
        if opening.max_wait_s is not None and arrived_s + opening.max_wait_s < end_s:
            end_s, late = arrived_s + opening.max_wait_s, WaitedInVain
        waiter = self._join(opening, arrived_s)
        try:
            while True:
                self._report(waiter)
                waiter.has_news.clear()
                # A slot that becomes free from here on sets `has_news`, so no wake-up is lost during the attempt.
                # Whoever is sent away during it hears so; the caller gives back what came of it.
                if self._may_try(waiter) and await try_take() and waiter.error is None:
                    return loop.time() - began_s
                await self._wait_for_news(waiter, end_s, late)
        finally:
            self._leave(waiter)

    async def _wait_for_news(self, waiter: _Waiter, end_s: float, late: type[WaitedInVain]) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= end_s and waiter.error is None:
            self._keep_place(waiter, loop.time())
            raise late(f"No slot became free within the {waiter.opening.limit_s:.3g} s allowed.")
        # Whoever left or was sent away during the attempt is no longer in the queue.
        pause_s = _TRY_S if self._may_try(waiter) else _REPORT_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(end_s, loop.time() + pause_s)):
                await waiter.has_news.wait()
        if waiter.error is not None:
            raise waiter.error

    def _keep_place(self, waiter: _Waiter, now_s: float) -> None:
        """Let a session come again to its place: behind all who came since, it might never be the first."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept[1] > now_s}
        self._kept[waiter.opening.session] = waiter, now_s + _KEPT_S

    def _earlier(self, opening: Opening, now_s: float) -> _Waiter | None:
        """Take away the earlier call of the session, if it waits, or if its place is kept; return it."""
        waiter = self._dismiss(opening.session, StaleRound("a later call of the session waits in this one's place"))
        kept, until_s = self._kept.pop(opening.session, (None, 0.0))
        return kept if waiter is None and now_s < until_s else waiter

    def _may_try(self, waiter: _Waiter) -> bool:
        return self._waiters[:1] == [waiter] or waiter.opening.overtakes()

    def withdraw(self, session: str) -> bool:
        """Send away whoever waits for a slot of the session, which is closed; return whether somebody did."""
        return self._dismiss(session, StaleRound("the session was closed before it had a slot")) is not None

    def refuse_all(self, error: Callable[[], SpecSplitError]) -> None:
        """Send everybody away, each with an error of its own."""
        for waiter in list(self._waiters):
            self._dismiss(waiter.opening.session, error())

    def close(self, name: str) -> None:
        """Send everybody away, since the worker is closed."""
        self.refuse_all(lambda: WorkerClosed(f"The {name} worker has been closed; start a new one."))

    def _join(self, opening: Opening, arrived_s: float) -> _Waiter:
        earlier = self._earlier(opening, asyncio.get_running_loop().time())
        if earlier is None:
            self._check_room(opening)
            if len(self._waiters) <= self.max_waiting // 2:
                self._rate.forget_promises()  # those who were promised a place do not come
            self._num_arrived += 1
        number = self._num_arrived if earlier is None else earlier.number
        waiter = _Waiter(opening, arrived_s if earlier is None else earlier.arrived_s, number, current_listener())
        insort(self._waiters, waiter)
        if earlier is None and opening.priority is not None:
            log_session("queued", opening.session, opening.request_id, f"{len(self._waiters)} wait")
        self._tell_behind(waiter)
        return waiter

    def _check_room(self, opening: Opening) -> None:
        if opening.since_s is not None:
            return  # it was let in before, and there are no more of these than slots
        if len(self._waiters) >= self.max_waiting:
            raise self.overloaded("All sessions of this worker are in use and its queue is full; try again")
        if opening.caller or opening.priority is None:
            kin = [other for other in self._waiters if _has_one_quota(other.opening, opening)]
            if len(kin) >= max(1, self.max_waiting // 2):
                raise self.overloaded("This caller has as many requests waiting as one may have; try again")

    def _dismiss(self, session: str, error: SpecSplitError) -> _Waiter | None:
        waiter = next((waiter for waiter in self._waiters if waiter.opening.session == session), None)
        if waiter is not None:
            waiter.error = error
            self._leave(waiter)
            waiter.has_news.set()
        return waiter

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._tell_behind(waiter)
            self._waiters.remove(waiter)

    def _tell_behind(self, waiter: _Waiter) -> None:
        """Wake those behind: their positions have changed, and one may have become the first."""
        place = self._waiters.index(waiter) + 1
        for other in self._waiters[place : place + _NEAR_FRONT]:
            other.has_news.set()

    def _report(self, waiter: _Waiter) -> None:
        if waiter.listener is not None and waiter.opening.priority is not None:
            position = self._waiters.index(waiter) + 1
            waiter.listener(Progress(queued=len(self._waiters), position=position))

    def _take_note(self) -> None:
        assert self._loop is not None, "slots that become free are told to a loop"
        if self._waiters:
            self._waiters[0].has_news.set()
        elif self.max_waiting:  # without places to wait in, nobody waits though no slot is free
            self._rate.rest()
            return
        self._rate.observe(self._loop.time())


def _has_one_quota(one: Opening, other: Opening) -> bool:
    return one.caller == other.caller and (one.priority is None) == (other.priority is None)
