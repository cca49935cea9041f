"""Tells the stages of a chain which slots' sessions have ended, beside everything else that the chain does.

Whoever ends a session waits for no stage. What a stage has not confirmed is told again, over the next chain if this one
is lost; a slot that has been given to another session meanwhile is safe, since the epoch that is over goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from specsplit.core.errors import SpecSplitError
from specsplit.stages.wire.connection import Connection

_AGAIN_S = 1.0


class EndedSlots:
    """Slots that have ended, until every stage has confirmed it over a chain that `current` gives before and after."""

    def __init__(self, current: Callable[[], Connection | None], in_order: asyncio.Lock) -> None:
        self._current, self._in_order = current, in_order
        self._epochs: dict[int, int] = {}
        """Per slot the last epoch that is over."""
        self._telling: asyncio.Task[None] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._epochs)

    def add(self, slot: int, epoch: int) -> None:
        """Note that a slot's session has ended, and begin to tell."""
        self._epochs[slot] = epoch
        self.tell()

    def tell(self) -> None:
        """Begin to tell what has not been confirmed, if there is a chain and something to tell."""
        if self._epochs and not self._is_closed and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell())

    async def aclose(self) -> None:
        """Tell no more."""
        self._is_closed = True
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})

    async def _tell(self) -> None:
        while self._epochs and (connection := self._current()) is not None and connection.lost is None:
            ended = dict(self._epochs)
            if not await _confirmed(connection, ended):
                await asyncio.sleep(_AGAIN_S)
                continue
            async with self._in_order:  # after a move of slots to a spare, which may have begun before
                if connection is self._current():
                    for slot in [slot for slot, epoch in ended.items() if self._epochs[slot] == epoch]:
                        del self._epochs[slot]


async def _confirmed(connection: Connection, ended: dict[int, int]) -> bool:
    ending = [peer.end(connection.chain, *one) for peer in connection.peers for one in ended.items()]
    errors = [error for error in await asyncio.gather(*ending, return_exceptions=True) if error is not None]
    for error in errors:
        if not isinstance(error, SpecSplitError):
            raise error
    return not errors
