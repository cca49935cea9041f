"""The connections of a chain, one after the other: the current one, and how a lost one is made whole again."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from dataclasses import replace

from specsplit.core.errors import PeerMismatch, SpecSplitError, WorkerClosed, WorkerUnreachable
from specsplit.stages.wire.admission import not_answered
from specsplit.stages.wire.connection import Connection
from specsplit.stages.wire.frames import ChainId
from specsplit.stages.wire.members import ChainMembers
from specsplit.stages.wire.peer import StagePeer
from specsplit.stages.wire.statistics import RemoteChainStatistics

AGAIN_S = 1.0
"""A chain that was down so recently is not tried again."""
_PAUSE_S = (0.05, 0.15)
"""The pause between two attempts is drawn from this range, so that coordinators do not come all at once."""


class ChainConnector:
    """Makes the connections of `members`; its methods are called one at a time, in the order of the chain's calls."""

    def __init__(self, members: ChainMembers, on_draining: Callable[[StagePeer], None]) -> None:
        self.connection: Connection | None = None
        """The current connection; it may be lost."""
        self.on_connected: Callable[[], object] = lambda: None
        self.statistics = RemoteChainStatistics()
        """Counts of connections that are over; `snapshot` adds those of the current one."""
        self._members, self._on_draining = members, on_draining
        self._coordinator, self._number = secrets.token_hex(8), 0
        self._secret = members.options.secret or secrets.token_bytes(32)
        self._is_closed = False
        self._down: tuple[float, SpecSplitError] | None = None
        """When and why the chain could not be restored last."""
        self._failure: SpecSplitError | None = None
        """Why the connection before was given up, or what the tries to make another one have met since."""

    @property
    def trouble(self) -> SpecSplitError | None:
        """Return why the chain is not whole just now, None if it is."""
        connection = self.connection
        if connection is None:
            return self._failure or WorkerUnreachable("The chain has not been connected.")
        return connection.lost and (self._failure or connection.lost)

    @property
    def is_down(self) -> bool:
        """Whether the last try to restore the chain failed."""
        return self._down is not None

    def snapshot(self) -> RemoteChainStatistics:
        """Return what was counted until now."""
        counted, used = self.statistics, list(self._members.spares_used)
        now = replace(counted, spares_used=used, link_bytes=dict(counted.link_bytes))
        if self.connection is not None:
            now.add(self.connection)
        return now

    def next_chain(self) -> ChainId:
        """Return the id of the next configuration; of two, the stages obey the one with the higher number."""
        self._number += 1
        return ChainId(self._coordinator, self._number, self._secret)

    def check_open(self) -> None:
        if self._is_closed:
            raise WorkerClosed("The chain has been closed; make a new one.")

    async def ready(self) -> Connection:
        """Return a connection over which packets can be sent; restores the chain if it is lost.

        Raises:
            WorkerUnreachable, PeerMismatch: it cannot be restored, and which stage is missing.
        """
        self.check_open()
        connection = self.connection
        if connection is not None and connection.lost is None:
            return connection
        # Where another coordinator has a stage now, this is refused until that one has left: nobody takes turns.
        return await self._restore()

    async def connect_first(self) -> None:
        """Look at all members, and make a chain of them that begins with empty slots; raises as `admit_all` does."""
        self.check_open()
        with self._members.undone_on_failure():
            await self._members.admit_all()
            await self._join(keep_slots=False)

    async def connect(self, *, keep_slots: bool) -> Connection:
        """Make a chain of the members in the place of the one before."""
        before, self.connection = self.connection, None
        if before is not None:
            anew = WorkerUnreachable("The chain is being connected anew.")
            self._failure = self._failure or before.lost or anew
            await self._close(before)
        connection = Connection(self.next_chain(), self._members.stages, self._on_draining)
        is_first = self.statistics.num_connections == 0
        try:
            await connection.open(keep_slots=keep_slots, takeover=self._members.options.takeover and is_first)
        except BaseException:
            await connection.aclose()
            raise
        # `aclose` does not wait for the lock under which this runs, so it may have been called since the first check.
        if self._is_closed:
            await connection.aclose(in_order=True)
            self.check_open()
        self.statistics.num_connections += 1
        self.connection, self._failure = connection, None
        self._members.note_connected()
        self.on_connected()
        return connection

    def refuse(self) -> None:
        """Make no connection any more."""
        self._is_closed = True

    async def aclose(self) -> None:
        """Let the stages go, which frees their slots."""
        connection, self.connection = self.connection, None
        if connection is not None:
            await self._close(connection, in_order=connection.lost is None)

    async def _close(self, connection: Connection, *, in_order: bool = False) -> None:
        await connection.aclose(in_order=in_order)
        self.statistics.add(connection)

    async def _restore(self) -> Connection:
        """Make the chain whole again within `reconnect_s`; try only once if the last try failed."""
        loop, limit_s = asyncio.get_running_loop(), self._members.options.reconnect_s
        is_again = self._down is not None
        if self._down is not None:
            since_s, error = self._down
            if loop.time() - since_s < AGAIN_S:
                raise error.with_traceback(None)
        end_s = loop.time() + limit_s
        error = None
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    connection = await self._attempt()
                self._down = None
                return connection
            except TimeoutError:
                error = error or not_answered(self._members.all, limit_s)
            except SpecSplitError as failure:
                error = failure
            self._failure = error
            is_final = is_again or isinstance(error, PeerMismatch | WorkerClosed)
            if is_final or loop.time() + _PAUSE_S[1] > end_s:
                break
            await asyncio.sleep(random.uniform(*_PAUSE_S))
        self._down = loop.time(), error
        raise error

    async def _attempt(self) -> Connection:
        self.check_open()
        self.statistics.num_tries += 1
        with self._members.undone_on_failure():
            await self._members.replace_lost()
            return await self._join(keep_slots=True)

    async def _join(self, *, keep_slots: bool) -> Connection:
        """Connect the members; a spare that does not serve in its new place makes room for the next one."""
        while True:
            try:
                return await self.connect(keep_slots=keep_slots)
            except SpecSplitError as error:
                await self._members.replace_suspect(error)
