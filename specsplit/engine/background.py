"""Work of no session, such as a score: it uses idle slots, behind all sessions, and gives them back to these."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeVar

from specsplit.core.errors import NoFreeSlot
from specsplit.engine.admission import AdmissionQueue, Opening
from specsplit.engine.slots import Slots

T = TypeVar("T")


class GaveWay(NoFreeSlot):
    """A session took the slot of work that had begun; `BackgroundWork` begins it again."""


class BackgroundWork:
    """Runs work that borrows slots; if it `leaves_one`, the last one is for sessions.

    Stages are the reason to leave one: work that is pending there keeps its slot until it is back.
    """

    def __init__(self, admission: AdmissionQueue, slots: Slots, *, leaves_one: bool) -> None:
        self._admission, self._slots, self._limit = admission, slots, max(1, slots.num_slots - leaves_one)
        self._num_running, self._keys = 0, count()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work` returns, called once a slot is idle that no session waits for, and after NoFreeSlot again.

        Raises:
            Overloaded: no place in the queue is left for it.
            NoFreeSlot: no slot is free, and there is no queue.
        """
        opening = Opening(f"background {next(self._keys)}", priority=None)
        arrived_s, has_turn = asyncio.get_running_loop().time(), not len(self._admission)
        while True:
            has_failed = has_turn and (self._num_running < self._limit or not self._admission.max_waiting)
            if has_failed:
                self._num_running += 1
                try:
                    return await work()
                except GaveWay:
                    opening = replace(opening, since_s=arrived_s)  # it was let in before: it may wait in any case
                except NoFreeSlot:
                    if not self._admission.has_place_for(opening):
                        raise
                finally:
                    self._num_running -= 1
            # Whoever has failed just now would fail again until something happens.
            first = iter((False,) if has_failed else ())
            await self._admission.wait(opening, partial(self._may_begin, first))
            has_turn = True

    async def _may_begin(self, first: Iterator[bool]) -> bool:
        return next(first, True) and self._num_running < self._limit and self._slots.num_used < self._slots.num_slots
