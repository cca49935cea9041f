"""Moves what a stage's slots hold to a spare, which then takes its place: on demand, or when the stage drains."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from specsplit.core.errors import DeadlineExceeded, SpecSplitError, WorkerUnreachable
from specsplit.stages.wire.connection import Connection
from specsplit.stages.wire.connector import ChainConnector
from specsplit.stages.wire.members import ChainMembers, find
from specsplit.stages.wire.peer import StagePeer


class SlotMover:
    """Moves slots between `members` while nothing else uses the chain, which `in_order` sees to."""

    def __init__(self, members: ChainMembers, in_order: asyncio.Lock) -> None:
        self._members, self._in_order = members, in_order
        self._moving: dict[str, asyncio.Task[None]] = {}
        """The task of each peer whose slots are being moved off."""

    def begin_draining(self, connector: ChainConnector, peer: StagePeer) -> None:
        """Begin to move a draining stage's slots away, if that has not begun."""
        if peer.address not in self._moving:
            moving = self._moving[peer.address] = asyncio.create_task(self._move_off(connector, peer))
            moving.add_done_callback(lambda _: self._moving.pop(peer.address))

    async def aclose(self) -> None:
        """Give up what is being moved."""
        moving = list(self._moving.values())
        for task in moving:
            task.cancel()
        if moving:
            await asyncio.wait(moving)

    async def move(self, connector: ChainConnector, peer: StagePeer, spare: StagePeer) -> int:
        """Let `spare` take the place of `peer` with its slots, and return how many were moved.

        It is called with `in_order` held. If it fails the chain is as it was.
        """
        members, timeout_s = self._members, self._members.options.call_timeout_s
        connection = await connector.ready()
        for peers, moved in ((members.stages, peer), (members.spares, spare)):
            find(peers, moved.address)  # one may have been lost until the chain was ready
        assert peer.identity is not None, "a chain that is ready knows its stages"
        await members.admit(spare, peer.identity)
        if spare.is_draining:
            raise WorkerUnreachable(f"{spare.name} is shutting down and takes nothing new.")
        index, num_stages = members.stages.index(peer), len(members.stages)
        following = "" if index + 1 == num_stages else members.stages[index + 1].address
        await _wait_quiet(connection, peer, timeout_s)
        # The spare learns its position in a chain that is never connected: the number after it configures everybody.
        chain, num_moved = connector.next_chain(), 0
        await spare.configure(chain, index, num_stages, following, keep_slots=False)
        for slot in range(members.num_slots):
            num_bytes = await peer.move_slot(chain, slot, spare, timeout_s)
            connector.statistics.moved_bytes += num_bytes
            num_moved += num_bytes > 0
        connector.statistics.num_moved_slots += num_moved
        # From here on the spare is a member: should connecting fail, the chain is restored with it if possible.
        members.swap(index, spare, WorkerUnreachable(f"{peer.name} was to be replaced."))
        await connector.connect(keep_slots=True)
        return num_moved

    async def _move_off(self, connector: ChainConnector, peer: StagePeer) -> None:
        """Move a draining stage's slots to the first spare that takes them; without one it is replaced when it ends."""
        async with self._in_order:
            for spare in list(self._members.spares):
                if peer not in self._members.stages:
                    return
                with suppress(SpecSplitError):
                    await self.move(connector, peer, spare)


async def _wait_quiet(connection: Connection, peer: StagePeer, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await connection.wait_quiet()
    except TimeoutError:
        raise DeadlineExceeded(f"{peer.name} was not done with its packets in time to be moved.") from None
    if connection.lost is not None:
        raise connection.lost
