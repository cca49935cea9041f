"""A chain of stages in other processes: the StageLink of a coordinator, which alone knows who they are and who is next.

When a stage is lost everything in flight fails, and the next packet first restores the chain: the stage again, once it
is back at its address, or a spare with the same layers. Stages that lived on keep their slots; a new one says what it
lacks when it gets a packet, and the coordinator's runner sends it again. Knows no rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from specsplit.core.errors import DeadlineExceeded, SpecSplitError, WorkerUnreachable
from specsplit.core.exactness import Exactness, joint_exactness, joint_numerics
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.stages.identity import ExpectedChain, StageIdentity
from specsplit.stages.packet import Packet
from specsplit.stages.wire.admission import hanging
from specsplit.stages.wire.connection import Connection
from specsplit.stages.wire.connector import ChainConnector
from specsplit.stages.wire.ended import EndedSlots
from specsplit.stages.wire.hand_over import SlotMover
from specsplit.stages.wire.members import ChainMembers, find
from specsplit.stages.wire.options import LinkOptions
from specsplit.stages.wire.peer import StagePeer
from specsplit.stages.wire.statistics import RemoteChainStatistics


class RemoteChain:
    """Implements StageLink over gRPC; lives on the event loop that calls `connect`.

    `stages` are addresses in the order of their layers, `spares` those of stages that may take the place of one with
    the same layers. `own` is a stage of this process, before all others.
    """

    def __init__(
        self,
        stages: Sequence[str],
        spares: Sequence[str],
        expected: ExpectedChain,
        options: LinkOptions | None = None,
        security: Security = ON_LOOPBACK,
        own: StagePeer | None = None,
    ) -> None:
        self._members = ChainMembers(stages, spares, expected, security, own)
        self._members.options = options or LinkOptions()
        # Whatever changes the chain, or needs it to stay as it is, happens under this lock, in the order of the calls;
        # answers are awaited outside of it, so that packets overtake no other and still pipeline.
        self._in_order = asyncio.Lock()
        self._mover = SlotMover(self._members, self._in_order)
        self._connector = ChainConnector(self._members, self._on_draining)
        self._ended = EndedSlots(self._current, self._in_order)
        self._connector.on_connected = self._ended.tell
        for peer in self._members.all:
            peer.on_renamed = partial(self._leave_name, peer)

    @property
    def options(self) -> LinkOptions:
        """Its patience; another one counts from the next call."""
        return self._members.options

    @options.setter
    def options(self, options: LinkOptions) -> None:
        self._members.options = options

    @property
    def statistics(self) -> RemoteChainStatistics:
        """Return what was counted until now."""
        return self._connector.snapshot()

    @property
    def num_stages(self) -> int:
        return len(self._members.stages)

    @property
    def exactness(self) -> Exactness:
        """Return "bits" if all stages say so, with the same numerics."""
        return joint_exactness(self.identities)

    @property
    def numerics(self) -> str:
        """Return the numerics that all stages have, empty if they differ or are unknown."""
        return joint_numerics(self.identities)

    @property
    def revision(self) -> int:
        """Return how often the two have changed since the chain was connected first."""
        return self._members.revision

    @property
    def addresses(self) -> list[str]:
        """Return where the stages are, in their order."""
        return self._members.addresses

    @property
    def spare_addresses(self) -> list[str]:
        return [peer.address for peer in self._members.spares]

    @property
    def identities(self) -> list[StageIdentity]:
        """Return who the stages are, in their order; none before `connect`."""
        return self._members.identities

    @property
    def trouble(self) -> SpecSplitError | None:
        """Return why the chain is not whole just now; the next packet tries to restore it."""
        return self._connector.trouble

    @property
    def is_down(self) -> bool:
        """Whether the last try to restore the chain failed."""
        return self._connector.is_down

    @property
    def num_ended_slots(self) -> int:
        """Slots whose session has ended, and of which some stage has not confirmed it yet."""
        return len(self._ended)

    async def connect(self) -> None:
        """Look at every stage and spare, and make a chain of the stages, with spares for those that are away.

        Raises:
            PeerMismatch: one does not fit, and why, or serves another coordinator.
            LinkError: a stage cannot be reached, and no spare replaces it. A spare that cannot is left for later.
        """
        async with self._in_order:
            await self._connector.connect_first()

    async def send(self, packet: Packet) -> Packet:
        """Send a packet through the whole chain and return the last stage's answer to it.

        Raises:
            SpecSplitError: the error of a stage.
            CorruptPacket; WorkerUnreachable: a stage is lost; DeadlineExceeded.
            PeerMismatch: another coordinator has taken a stage, or another stage came back.
        """
        timeout_s = self.options.call_timeout_s
        async with self._in_order:
            connection = await self._connector.ready()
            answer = connection.begin(packet)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            late = f"The chain gave no answer within {timeout_s:g} s."
            connection.lose(WorkerUnreachable(late))  # whichever stage is stuck, restoring it finds out
            raise DeadlineExceeded(late) from None
        finally:
            connection.forget(packet.request_id)

    async def mend(self) -> None:
        """Restore a chain that is not whole, without a packet; raises as `send` does."""
        async with self._in_order:
            await self._connector.ready()

    async def look(self) -> None:
        """Give up a chain whose stage hangs in a step, or fails while a spare is well: the next packet restores it."""
        connection = self._current()
        if connection is None or connection.lost is not None:
            return
        if connection.num_in_flight:
            error = await hanging(connection.peers, self.options.step_timeout_s)
            if error is not None:
                connection.lose(error)
        for peer in connection.peers:
            is_in_doubt, peer.is_in_doubt = peer.is_in_doubt, False
            if is_in_doubt and await self._members.is_failing(peer):
                connection.lose(WorkerUnreachable(f"{peer.name} fails in every step."))

    def lose(self, error: SpecSplitError) -> None:
        """Give up the connection as if a stream had broken with `error`, so that the next packet restores the chain."""
        if (connection := self._current()) is not None:
            connection.lose(error)

    def give_up(self) -> None:
        """Fail what is in flight, and restore the chain no more: nobody waits for it any longer."""
        self._connector.refuse()
        if (connection := self._current()) is not None and connection.num_in_flight:
            connection.lose(WorkerUnreachable("The target is shutting down."))

    def end(self, slot: int, epoch: int) -> None:
        """Have every stage forget what a slot held until the end of an epoch; waits for none, and never fails."""
        self._ended.add(slot, epoch)

    def _leave_name(self, peer: StagePeer) -> None:
        """Give up a connection whose streams were opened under an earlier name than calls have now."""
        if (connection := self._current()) is not None and peer in connection.peers:
            connection.lose(WorkerUnreachable("The target's certificate has another name, so the chain is made anew."))

    async def move_slots(self, from_address: str, to_address: str) -> int:
        """Let a spare take a stage's place with all that its slots hold; return how many slots were moved.

        Waits for packets in flight, and holds up those that come meanwhile. If it fails the chain is as it was.

        Raises:
            InvalidRequest: there is no such stage, or no such spare.
            PeerMismatch: the spare is of other layers; LinkError: one of the two is lost.
        """
        async with self._in_order:
            peer = find(self._members.stages, from_address)
            spare = find(self._members.spares, to_address)
            return await self._mover.move(self._connector, peer, spare)

    async def aclose(self) -> None:
        """Let the stages go, which frees their slots, and close the connections."""
        self._connector.refuse()
        await self._mover.aclose()
        await self._ended.aclose()
        await self._connector.aclose()
        await self._members.aclose()

    def _current(self) -> Connection | None:
        return self._connector.connection

    def _on_draining(self, peer: StagePeer) -> None:
        self._mover.begin_draining(self._connector, peer)
