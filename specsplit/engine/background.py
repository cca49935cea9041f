"""Work of no session, such as a score: it waits behind all sessions, and never takes the last slot from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

from specsplit.core.errors import NoFreeSlot
from specsplit.engine.admission import AdmissionQueue, Opening

T = TypeVar("T")


class BackgroundWork:
    """Runs work that borrows a slot, of which `num_slots` less one may be borrowed at once."""

    def __init__(self, admission: AdmissionQueue, num_slots: int) -> None:
        self._admission, self._num_slots = admission, num_slots
        self._num_running, self._keys = 0, count()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work` returns once a slot is free that no session waits for.

        It is called again after it raised NoFreeSlot. Without a queue it is called at once.

        Raises:
            Overloaded: no place in the queue is left for it.
        """
        if not self._admission.max_waiting:
            return await work()
        results: list[T] = []

        async def try_run() -> bool:
            if self._num_running >= max(1, self._num_slots - 1):
                return False
            self._num_running += 1
            try:
                results.append(await work())
            except NoFreeSlot:
                return False
            finally:
                self._num_running -= 1
            return True

        if len(self._admission) or not await try_run():
            key = f"background {next(self._keys)}"
            await self._admission.wait(Opening(key, priority=None), try_run)
        return results[0]
