"""Work of no session, such as a score: it uses idle slots, behind all sessions, and gives them back to these.

    waiting [ the oldest: once it is due, sessions leave it a slot, which it keeps | ... | the youngest ]

So it ends however many sessions come, and takes one slot from them at most, half of the time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

from specsplit.core.errors import NoFreeSlot
from specsplit.engine.admission import AGE_S, AdmissionQueue, Opening
from specsplit.engine.slots import Loan, Slots
from specsplit.limits import MAX_PRIORITY

T = TypeVar("T")
DUE_S = AGE_S * (MAX_PRIORITY + 1)
"""Seconds after which the oldest work is due: its waiting outweighs the priority of every session that comes."""


class GaveWay(NoFreeSlot):
    """A session took the slot of work that had begun; `BackgroundWork` begins it again."""


class BackgroundWork:
    """Runs work that borrows slots; if it `leaves_one`, the last one is for sessions.

    Stages are the reason to leave one: work that is pending there keeps its slot until it is back.
    """

    def __init__(self, admission: AdmissionQueue, slots: Slots, *, leaves_one: bool) -> None:
        self._admission, self._slots, self._limit = admission, slots, max(1, slots.num_slots - leaves_one)
        self._num_running = 0
        self._loans: dict[Loan, None] = {}
        """One for each piece of work that has not ended, the oldest first."""
        self._due_s = 0.0
        """When a loan became due the last time, or at the earliest will the next time."""

    async def run(self, loan: Loan, work: Callable[[Loan], Awaitable[T]]) -> T:
        """Return what `work` returns, called once a slot is idle that no session waits for, and after NoFreeSlot again.

        Raises:
            Overloaded: no place in the queue is left for it.
            NoFreeSlot: no slot is free, and there is no queue.
        """
        loop = asyncio.get_running_loop()
        loan.arrived_s = loop.time()
        self._loans[loan] = None
        try:
            return await self._run(loan, work)
        finally:
            del self._loans[loan]
            if self._slots.due is loan:
                self._slots.due = None
                # Sessions have the slot for as long as they went without it.
                self._due_s = 2 * loop.time() - self._due_s

    async def _run(self, loan: Loan, work: Callable[[Loan], Awaitable[T]]) -> T:
        is_due = partial(self._is_due, loan)
        # Clients name their sessions in the same queue: nobody is to guess this one and close it.
        opening = Opening(f"background {secrets.token_hex(16)}", priority=None, overtakes=is_due)
        has_turn = not len(self._admission)
        while True:
            has_failed = has_turn and (self._num_running < self._limit or not self._admission.max_waiting)
            if has_failed:
                is_due()
                self._num_running += 1
                try:
                    return await work(loan)
                except GaveWay:
                    loan.slot = None
                    opening = replace(opening, since_s=loan.arrived_s)  # it was let in before: it may wait in any case
                except NoFreeSlot:
                    if not self._admission.has_place_for(opening):
                        raise
                finally:
                    self._num_running -= 1
            # Whoever has failed just now would fail again until something happens.
            first = iter((False,) if has_failed else ())
            await self._admission.wait(opening, partial(self._may_begin, loan, first))
            has_turn = True

    async def _may_begin(self, loan: Loan, first: Iterator[bool]) -> bool:
        due, has_idle_slot = self._slots.due, self._slots.num_used < self._slots.num_slots
        # What is due tries as a session does: a slot that nobody uses may have to be taken from its session. Until it
        # has one, nothing younger begins.
        may_try = self._is_due(loan) or (has_idle_slot and (due is None or due.slot is not None))
        return next(first, True) and self._num_running < self._limit and may_try

    def _is_due(self, loan: Loan) -> bool:
        """Whether sessions leave the loan a slot: it is the oldest, and has waited long enough; they do from now on."""
        due_s, now_s = max(loan.arrived_s + DUE_S, self._due_s), asyncio.get_running_loop().time()
        is_next = loan is next(iter(self._loans)) and now_s >= due_s and self._num_running < self._limit
        if self._slots.due is None and is_next:
            self._slots.due, self._due_s = loan, now_s
        return self._slots.due is loan
