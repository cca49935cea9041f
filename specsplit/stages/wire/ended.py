"""Informs the stages of a chain which slots' sessions have ended, concurrently with everything else it does.

The end of a session waits for no stage. A stage that has not confirmed it is informed again, over the next chain if
this one is lost. A slot that serves another session meanwhile is safe, since the message names the epoch that is over.
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
        """Record that a slot's session has ended, and begin to inform the stages."""
        self._epochs[slot] = epoch
        self.tell()

    def tell(self) -> None:
        """Begin to send what has not been confirmed, if there is a chain and something to send."""
        if self._epochs and not self._is_closed and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell())

    async def aclose(self) -> None:
        """Send no more."""
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
            # Taken after a move of slots to a spare, which may have begun before: the spare has not been informed.
            async with self._in_order:
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
