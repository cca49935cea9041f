"""A chain of stages in other processes: the StageLink of a coordinator, which alone knows who they are and who is next.

When a stage is lost everything under way fails, and the next packet first restores the chain: the stage again, once it
is back at its address, or a spare with the same layers. Stages that lived on keep their slots; what the new one lacks
it says when it gets a packet, and the coordinator's runner sends it again. Knows no rows.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from specsplit.core.defaults import STEP_TIMEOUT_S
from specsplit.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PeerMismatch,
    SpecSplitError,
    WorkerClosed,
    WorkerUnreachable,
)
from specsplit.rpc.clients import CALL_TIMEOUT_S
from specsplit.stages.identity import StageIdentity, WantedChain
from specsplit.stages.packet import Packet
from specsplit.stages.wire.admission import PING_S, admit, hanging, not_answered, why_lost
from specsplit.stages.wire.connection import Connection
from specsplit.stages.wire.ended import EndedSlots
from specsplit.stages.wire.frames import ChainId
from specsplit.stages.wire.next_stage import NextUnreachable
from specsplit.stages.wire.peer import StagePeer
from specsplit.stages.wire.statistics import RemoteChainStatistics

RECONNECT_S = 5.0
_AGAIN_S = 1.0
"""A chain that was down so recently is not tried again."""
_PAUSE_S = (0.05, 0.15)
"""Between two attempts, drawn at random so that coordinators do not come all at once."""


class RemoteChain:
    """Implements StageLink over gRPC; lives on the event loop that calls `connect`.

    `stages` are addresses in the order of their layers, `spares` those of stages that may take the place of one with
    the same layers. `call_timeout_s` limits a packet's way down the chain and back, `reconnect_s` how long a packet
    waits for a lost stage. A stage that computes one step for longer than `step_timeout_s` hangs, and counts as lost
    even while it answers. `takeover` takes stages from another coordinator that still uses them.
    """

    def __init__(
        self,
        stages: Sequence[str],
        spares: Sequence[str],
        wanted: WantedChain,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
        takeover: bool = False,
    ) -> None:
        addresses = [*stages, *spares]
        for address in addresses:
            if addresses.count(address) > 1:
                raise InvalidRequest(f"The stage at {address} is named twice.", param="stages")
        self._statistics = RemoteChainStatistics()
        self._peers = [StagePeer(address) for address in stages]
        self._spares = [StagePeer(address) for address in spares]
        self._wanted = wanted
        self._call_timeout_s, self._reconnect_s, self._takeover = call_timeout_s, reconnect_s, takeover
        self._step_timeout_s = step_timeout_s
        self._coordinator = secrets.token_hex(8)
        self._number = 0
        self._connection: Connection | None = None
        self._is_closed = False
        self._in_order = asyncio.Lock()
        self._down: tuple[float, SpecSplitError] | None = None
        """When and why the chain could not be restored last."""
        self._ended = EndedSlots(lambda: self._connection, self._in_order)
        self._moving: set[asyncio.Task[None]] = set()

    @property
    def statistics(self) -> RemoteChainStatistics:
        """Return what was counted until now."""
        counted = self._statistics
        now = replace(counted, spares_used=list(counted.spares_used), link_bytes=dict(counted.link_bytes))
        if self._connection is not None:
            now.add(self._connection)
        return now

    @property
    def num_stages(self) -> int:
        return len(self._peers)

    @property
    def addresses(self) -> list[str]:
        """Return where the stages are, in their order."""
        return [peer.address for peer in self._peers]

    @property
    def spare_addresses(self) -> list[str]:
        return [peer.address for peer in self._spares]

    @property
    def identities(self) -> list[StageIdentity]:
        """Return who the stages are, in their order; none before `connect`."""
        return [peer.identity for peer in self._peers if peer.identity is not None]

    @property
    def trouble(self) -> SpecSplitError | None:
        """Return why the chain is not whole just now; the next packet tries to restore it."""
        if self._connection is not None:
            return self._connection.lost
        return self._down[1] if self._down else WorkerUnreachable("The chain has not been connected.")

    @property
    def is_down(self) -> bool:
        """Whether the last try to restore the chain failed."""
        return self._down is not None

    async def connect(self) -> None:
        """Look at every stage and spare, and make a chain of the stages.

        Raises:
            PeerMismatch: one does not fit, and why, or serves another coordinator.
            LinkError: a stage cannot be reached. A spare that cannot is left for later.
        """
        async with self._in_order:
            self._check_open()
            pings = [await peer.ping() for peer in self._peers]
            found = [(peer.address, ping.identity) for peer, ping in zip(self._peers, pings, strict=True)]
            await asyncio.to_thread(self._wanted.check_chain, found)
            for peer, ping in zip(self._peers, pings, strict=True):
                peer.admit(ping)
            for spare in self._spares:
                with suppress(WorkerUnreachable, DeadlineExceeded):
                    await self._admit_spare(spare)
            await self._configure(self._peers, keep_slots=False)

    async def send(self, packet: Packet) -> Packet:
        """Send a packet through the whole chain and return the last stage's answer to it.

        Raises:
            What a stage raises; CorruptPacket; WorkerUnreachable: a stage is lost; DeadlineExceeded.
            PeerMismatch: another coordinator has taken a stage, or what came back is another stage.
        """
        async with self._in_order:
            connection = await self._ready()
            answer = connection.begin(packet)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await answer
        except TimeoutError:
            late = f"The chain gave no answer within {self._call_timeout_s:g} s."
            connection.lose(WorkerUnreachable(late))  # whichever stage is stuck, restoring it finds out
            raise DeadlineExceeded(late) from None
        finally:
            connection.forget(packet.request_id)

    async def mend(self) -> None:
        """Restore a chain that is not whole, without a packet; raises as `send` does."""
        async with self._in_order:
            await self._ready()

    async def look(self) -> None:
        """Give up a chain that waits for a stage which hangs in a step, so that the next packet restores it."""
        connection = self._connection
        if connection is None or connection.lost is not None or not connection.num_in_flight:
            return
        error = await hanging(connection.peers, self._step_timeout_s)
        if error is not None:
            connection.lose(error)

    def end(self, slot: int, epoch: int) -> None:
        """Have every stage forget what a slot held until the end of an epoch; waits for none, and never fails."""
        self._ended.add(slot, epoch)

    async def move_slots(self, from_address: str, to_address: str) -> int:
        """Let a spare take a stage's place with all that its slots hold; return how many slots were moved.

        Waits for what is under way, and holds up what comes meanwhile. If it fails the chain is as it was.

        Raises:
            InvalidRequest: there is no such stage, or no such spare.
            PeerMismatch: the spare is of other layers; LinkError: one of the two is lost.
        """
        async with self._in_order:
            peer, spare = _find(self._peers, from_address), _find(self._spares, to_address)
            return await self._move(peer, spare)

    async def aclose(self) -> None:
        """Let the stages go, which frees their slots, and close the connections."""
        self._is_closed = True
        for task in list(self._moving):
            task.cancel()
        if self._moving:
            await asyncio.wait(self._moving)
        await self._ended.aclose()
        connection = self._connection
        if connection is not None:
            self._connection = None
            await self._close(connection, in_order=connection.lost is None)
        for peer in (*self._peers, *self._spares):
            await peer.aclose()

    # What follows runs in the order of the calls, one at a time.

    def _check_open(self) -> None:
        if self._is_closed:
            raise WorkerClosed("The chain has been closed; make a new one.")

    async def _ready(self) -> Connection:
        self._check_open()
        connection = self._connection
        if connection is not None and connection.lost is None:
            return connection
        if connection is not None and isinstance(connection.lost, PeerMismatch):
            raise connection.lost  # another coordinator wants the stages; two that take turns would serve nobody
        return await self._restore()

    async def _restore(self) -> Connection:
        """Make the chain whole again within `reconnect_s`; try once only if it was down just now.

        Raises:
            WorkerUnreachable, PeerMismatch: it cannot be, and which stage is missing.
        """
        loop = asyncio.get_running_loop()
        is_again = self._down is not None
        if self._down is not None:
            since_s, error = self._down
            if loop.time() - since_s < _AGAIN_S:
                raise error.with_traceback(None)
        end_s = loop.time() + self._reconnect_s
        error = None
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    connection = await self._attempt()
                self._down = None
                return connection
            except TimeoutError:
                error = error or not_answered([*self._peers, *self._spares], self._reconnect_s)
            except SpecSplitError as failure:
                error = failure
            is_final = is_again or isinstance(error, PeerMismatch | WorkerClosed)
            if is_final or loop.time() + _PAUSE_S[1] > end_s:
                break
            await asyncio.sleep(random.uniform(*_PAUSE_S))
        self._down = loop.time(), error
        raise error

    async def _attempt(self) -> Connection:
        self._check_open()
        for peer in (*self._peers, *self._spares):
            peer.is_awaited = False
        found = await asyncio.gather(*(why_lost(peer, self._wanted, self._step_timeout_s) for peer in self._peers))
        for index, error in enumerate(found):
            if error is not None and not await self._replace(index):
                raise error
        try:
            return await self._configure(self._peers, keep_slots=True)
        except NextUnreachable as error:  # we reach both, and the one does not reach the other
            index = self.addresses.index(error.address)
            before = self._peers[index]
            if not await self._replace(index):
                raise
        try:
            return await self._configure(self._peers, keep_slots=True)
        except BaseException:  # a spare that mends nothing has not taken over
            self._swap(index, before)
            del self._statistics.spares_used[-2:]
            raise

    async def _admit_spare(self, spare: StagePeer) -> None:
        """Look at a spare, and check that it could stand somewhere in the chain; raises as `connect` does."""
        identity = (await spare.ping(PING_S)).identity
        for like in self.identities:
            if like.layers == identity.layers:
                return await self._admit(spare, like)
        raise PeerMismatch(f"The spare at {spare.address} has layers {identity.layers}, which no stage here has.")

    async def _admit(self, peer: StagePeer, like: StageIdentity) -> None:
        await admit(peer, like, self._wanted, self._step_timeout_s)

    async def _replace(self, index: int) -> bool:
        """Put a spare that fits in the place of a stage, and return whether there was one."""
        lost = self._peers[index]
        assert lost.identity is not None, "a chain is connected before it is restored"
        for spare in self._spares:
            try:
                await self._admit(spare, lost.identity)
            except PeerMismatch:
                continue
            except SpecSplitError:
                await spare.renew()
                continue
            if spare.is_draining:
                continue
            self._swap(index, spare)
            return True
        return False

    def _swap(self, index: int, spare: StagePeer) -> None:
        """Let a spare stand at `index`, and its predecessor stand by."""
        self._spares[self._spares.index(spare)] = self._peers[index]
        self._peers[index] = spare
        self._statistics.spares_used.append(spare.address)

    async def _configure(self, peers: Sequence[StagePeer], *, keep_slots: bool) -> Connection:
        """Make a chain of the stages in the place of the one before."""
        before, self._connection = self._connection, None
        if before is not None:
            await self._close(before)
        connection = Connection(self._next_chain(), peers, self._on_draining)
        is_first = self._statistics.num_connections == 0
        try:
            await connection.open(keep_slots=keep_slots, takeover=self._takeover and is_first)
        except BaseException:
            await connection.aclose()
            raise
        if self._is_closed:  # meanwhile
            await connection.aclose(in_order=True)
            self._check_open()
        self._statistics.num_connections += 1
        self._connection = connection
        self._ended.tell()
        return connection

    def _next_chain(self) -> ChainId:
        self._number += 1
        return ChainId(self._coordinator, self._number)

    async def _close(self, connection: Connection, *, in_order: bool = False) -> None:
        await connection.aclose(in_order=in_order)
        self._statistics.add(connection)

    def _on_draining(self, peer: StagePeer) -> None:
        moving = asyncio.create_task(self._move_off(peer))
        self._moving.add(moving)
        moving.add_done_callback(self._moving.discard)

    async def _move_off(self, peer: StagePeer) -> None:
        """Move a draining stage's slots to the first spare that takes them; without one it is replaced when it ends."""
        async with self._in_order:
            for spare in list(self._spares):
                if peer not in self._peers:
                    return
                with suppress(SpecSplitError):
                    await self._move(peer, spare)

    async def _move(self, peer: StagePeer, spare: StagePeer) -> int:
        connection = await self._ready()
        for peers, moved in ((self._peers, peer), (self._spares, spare)):
            _find(peers, moved.address)  # one may have been lost until the chain was ready
        assert peer.identity is not None, "a chain that is ready knows its stages"
        await self._admit(spare, peer.identity)
        if spare.is_draining:
            raise WorkerUnreachable(f"{spare.name} is shutting down and takes nothing new.")
        index, num_stages = self._peers.index(peer), len(self._peers)
        following = "" if index + 1 == num_stages else self._peers[index + 1].address
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await connection.wait_quiet()
        except TimeoutError:
            raise DeadlineExceeded(f"{peer.name} was not done with its packets in time to be moved.") from None
        if connection.lost is not None:
            raise connection.lost
        chain, num_moved = self._next_chain(), 0
        await spare.configure(chain, index, num_stages, following, keep_slots=False)
        for slot in range(self._wanted.num_slots):
            num_bytes = await peer.move_slot(chain, slot, spare, self._call_timeout_s)
            self._statistics.moved_bytes += num_bytes
            num_moved += num_bytes > 0
        self._statistics.num_moved_slots += num_moved
        self._swap(index, spare)
        await self._configure(self._peers, keep_slots=True)
        return num_moved


def _find(peers: Sequence[StagePeer], address: str) -> StagePeer:
    for peer in peers:
        if peer.address == address:
            return peer
    raise InvalidRequest(f"There is no stage at {address} here that could be moved so.", param="address")
