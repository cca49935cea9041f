"""Shares of a server: so many calls of one kind at once, the others caller by caller, and streams of one peer.

Knows no calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from specsplit.core.errors import NoFreeSlot
from specsplit.limits import MAX_PEER_STREAMS, MAX_WAITING_SCORES

_log = logging.getLogger(__name__)


class CallShare:
    """Lets at most `limit` calls run at once; the next one is of the caller that has waited longest for its turn."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_running = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Calls that wait, by caller; the first caller's turn is next."""

    @asynccontextmanager
    async def taken(self, caller: str) -> AsyncGenerator[None]:
        """Wait for a turn of the caller, and hold it for the length of the block.

        Raises:
            NoFreeSlot: too many of the caller's calls wait already.
        """
        # Whoever waits is given a turn before it is counted as free, so nobody who comes meanwhile overtakes.
        if self._num_running < self._limit:
            self._num_running += 1
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str) -> None:
        waiting = self._waiting.setdefault(caller, deque())
        if len(waiting) >= MAX_WAITING_SCORES:
            raise NoFreeSlot("This caller has as many scores waiting as one may have; try again in a moment.")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in waiting:
                waiting.remove(turn)
                if not waiting:
                    del self._waiting[caller]
            elif not turn.cancelled():
                self._pass_on()  # the turn came in the same moment, and is somebody else's now
            raise

    def _pass_on(self) -> None:
        """Give a turn that is over to the next caller, or to nobody."""
        while self._waiting:
            caller, waiting = next(iter(self._waiting.items()))
            turn = waiting.popleft()
            del self._waiting[caller]
            if waiting:
                self._waiting[caller] = waiting  # behind all other callers
            if not turn.done():  # its caller may have given up, and not have run since
                turn.set_result(None)
                return
        self._num_running -= 1


class StreamShare:
    """Counts the streams of each peer, which cost a server memory however little goes over them."""

    def __init__(self) -> None:
        self._open = Counter[str]()

    @contextmanager
    def taken(self, peer: str) -> Generator[None]:
        """Count a stream for the length of the block.

        Raises:
            NoFreeSlot: on entry, if the peer has as many open as one may have.
        """
        if self._open[peer] >= MAX_PEER_STREAMS:
            _log.info("refused a stream of %s, which has %d", peer, MAX_PEER_STREAMS)
            raise NoFreeSlot(f"This peer has {MAX_PEER_STREAMS} streams open, as many as one may have; end some.")
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
