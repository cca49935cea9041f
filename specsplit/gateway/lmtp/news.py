"""Reports of what the open streams of one client wait for, a few times a second at most. Knows no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from specsplit.gateway.lmtp.messages import Item

PERIOD_S = 0.25
"""Least time between two frames of news: a thousand streams in a queue all move up when one leaves it."""
Tell = Callable[[Callable[[], list[Item]]], Awaitable[None]]


class StreamNews:
    """Keeps the latest news of each stream, and hands them to `tell`; a later one takes the place of an earlier one."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._latest: dict[int, Item] = {}
        self._telling: asyncio.Task[None] | None = None
        self._is_closed = False

    def put(self, item: Item) -> None:
        """Report the news of a stream soon; after `close` nothing is reported."""
        if self._is_closed:
            return
        self._latest[item["stream_id"]] = item
        if self._telling is None:
            self._telling = asyncio.create_task(self._run())

    def drop(self, stream_id: int) -> None:
        """Forget what a stream waited for: it waits no longer."""
        self._latest.pop(stream_id, None)

    async def close(self) -> None:
        """Report nothing more."""
        self._is_closed = True
        self._latest.clear()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])

    async def _run(self) -> None:
        try:
            while self._latest:
                await self._tell(self._take)
                await asyncio.sleep(PERIOD_S)
        finally:
            # Here and not in a callback, which comes a turn later: news that came between would wait for the next ones.
            self._telling = None

    def _take(self) -> list[Item]:
        # Called when the frame is about to leave: no news of a stream comes behind its tokens.
        items = list(self._latest.values())
        self._latest.clear()
        return items
