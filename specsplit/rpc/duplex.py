"""A call that streams both ways, with a writer task and a reader task beside the caller. Knows no message."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from specsplit.core.errors import SpecSplitError
from specsplit.engine.cancellation import to_its_end
from specsplit.rpc.channel import Duplex

_log = logging.getLogger(__name__)
_FLUSH_S = 1.0
"""Longest wait at the end of a stream for its last message to leave and for the peer to end it."""


class DuplexStream:
    """Sends without waiting, and passes every message received to `take`; both stop with the call.

    An error that `take` raises ends the call. `name` is the name of the tasks.
    """

    def __init__(self, duplex: Duplex, take: Callable[[bytes], None], name: str) -> None:
        self._duplex, self._take = duplex, take
        self._outgoing: deque[bytes] = deque()
        self._has_outgoing = asyncio.Event()
        self._is_ending = False
        self._mistake: BaseException | None = None
        """Exception of the writer that is a mistake of ours and no error of the call."""
        loop = asyncio.get_running_loop()
        self._writer = loop.create_task(self._write_all(), name=f"{name}-writer")
        self._reader = loop.create_task(self._read_all(), name=f"{name}-reader")
        self._writer.add_done_callback(self._writer_ended)
        self._reader.add_done_callback(self._reader_ended)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be received."""
        return self._reader.done()

    def check(self) -> None:
        """Raise the error of the call, if it failed; call this when it is over."""
        if self._mistake is not None:
            raise self._mistake
        self._reader.result()

    def when_over(self, call: Callable[[], None]) -> None:
        """Call `call` when nothing more will be received."""
        self._reader.add_done_callback(lambda _: call())

    def send(self, data: bytes) -> None:
        """Send a message as soon as those before it have left; a failure shows with the reader."""
        self._outgoing.append(data)
        self._has_outgoing.set()

    def take_back(self, data: bytes) -> bool:
        """Withdraw a message that waits to be sent; return False if it has left already."""
        try:
            self._outgoing.remove(data)
        except ValueError:
            return False
        return True

    async def close(self, last: bytes | None = None, *, flush_s: float = _FLUSH_S) -> None:
        """End the call in order, with a `last` message; if the peer does not end it in time, break it off."""
        try:
            if not self._is_ending and not self._reader.done():
                self._is_ending = True
                if last is not None:
                    self._outgoing.append(last)
                self._has_outgoing.set()
                # A call broken off before would look like a lost client, and grpc.aio may keep a task of it for ever.
                await to_its_end(asyncio.wait({self._reader}, timeout=flush_s))
        finally:
            self._writer.cancel()
            self._reader.cancel()
            await to_its_end(asyncio.wait({self._writer, self._reader}))

    async def _read_all(self) -> None:
        while (data := await self._duplex.read()) is not None:
            self._take(data)

    async def _write_all(self) -> None:
        # An error of the call also reaches the reader, which reports it.
        with suppress(SpecSplitError):
            while not (self._is_ending and not self._outgoing):
                await self._has_outgoing.wait()
                while self._outgoing:
                    await self._duplex.write(self._outgoing.popleft())
                self._has_outgoing.clear()
            await self._duplex.end()

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        self._writer.cancel()
        self._duplex.cancel()
        if not reader.cancelled():
            _log_mistake(reader.exception())

    def _writer_ended(self, writer: asyncio.Task[None]) -> None:
        if not writer.cancelled() and (mistake := writer.exception()) is not None:
            self._mistake = mistake
            _log_mistake(mistake)
            # Nobody shall wait for the answer to a message that was never sent.
            self._duplex.cancel()


def _log_mistake(error: BaseException | None) -> None:
    """Log a mistake of ours; an error of the tree is raised to those who wait."""
    if error is not None and not isinstance(error, SpecSplitError):
        _log.error("a stream ended by a mistake of ours", exc_info=error)
