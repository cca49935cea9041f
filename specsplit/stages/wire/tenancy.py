"""Which coordinator a stage serves, and in which chain: taking it over, leaving it, and the time to come back to it.

A stage serves one coordinator at a time. A chain that the same coordinator configures later (a higher number) replaces
the one before, if it shows the same claim: the secret that it drew, and an identity as a target. Another coordinator is
refused while a stream of the first is open, unless it says `takeover` and shows the claim of the first. A coordinator
that says that it leaves frees the slots; one that is cut off has `grace_s` to come back to them.
"""

from __future__ import annotations

import asyncio

from specsplit.core.errors import AccessDenied, PeerMismatch, SpecSplitError, StaleEpoch
from specsplit.rpc.auth import current_peer
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.interceptors import draining
from specsplit.rpc.pb import stage_pb2
from specsplit.stages.ports import Stage
from specsplit.stages.wire.claim import Claim
from specsplit.stages.wire.frames import DRAINING, ChainId
from specsplit.stages.wire.pipeline_stage import Outbox, PipelineStage, Stopwatch


class Tenancy:
    """The position of `stage` in the chain of its coordinator, None while it has none.

    `changing` is held while the coordinator, its chain or the contents of whole slots change.
    """

    def __init__(self, stage: Stage, grace_s: float, security: Security = ON_LOOPBACK) -> None:
        self.position: PipelineStage | None = None
        self.is_draining = False
        self.grace_s = grace_s
        self.changing = asyncio.Lock()
        self.watch = Stopwatch()
        self._stage, self._owner, self._security = stage, Claim(), security
        self._abandoned: asyncio.Task[None] | None = None
        """The task that frees the slots of a coordinator that is gone, while its time runs."""
        self._sent_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of packets sent on, in this and all earlier positions."""
        return self._sent_bytes + (self.position.sent_bytes if self.position else 0)

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator has a stream open."""
        return self.position is not None and self.position.coordinator is not None

    def refuse(self) -> None:
        """Take no other coordinator any more, and let the one there is know that it should move its sessions."""
        self.is_draining = True
        if self.position is not None and self.position.coordinator is not None:
            self.position.coordinator.put_nowait(DRAINING)

    def position_in(self, chain: ChainId, *, exactly: bool = False) -> PipelineStage:
        """Return the stage's position in a chain of that coordinator, or in exactly that one.

        Raises:
            PeerMismatch: it serves another coordinator or none; StaleEpoch: another chain of this one.
            AccessDenied: the caller knows the coordinator's name, and its certificate is another one's.
        """
        position = self.position
        if position is None or position.chain.coordinator != chain.coordinator:
            raise PeerMismatch("The stage is not configured for this coordinator.")
        peer, owner = current_peer(), self._owner.name
        if peer.role == "target" and owner is not None and peer.name != owner:
            raise AccessDenied("The stage serves another coordinator.")
        if exactly and position.chain != chain:
            raise StaleEpoch(
                f"The stage stands in chain {position.chain.number} of its coordinator, not {chain.number}."
            )
        return position

    @property
    def owner_name(self) -> str | None:
        """The name that the coordinator which has the stage has proved; None without one."""
        return self._owner.name

    async def configure(self, request: stage_pb2.ConfigureRequest, name: str | None = None) -> bool:
        """Take the position that a coordinator asks for, and return whether the slots still hold what they held.

        `name` is the one that the coordinator has proved.

        Raises:
            PeerMismatch, StaleEpoch, WorkerUnreachable, UsageError: it is refused, and nothing changed.
        """
        chain, claim = ChainId.of(request.chain), Claim(name, request.secret)
        # Refused before anything changes: a link that would leave this machine in plaintext.
        if request.next_address:
            self._security.check_dial(request.next_address)
        async with self.changing:
            before = self.position
            is_same = self._is_same(before, chain, claim)
            self._check_change(before, chain, claim, is_same=is_same, takeover=request.takeover)
            # Streams of the old position are cut with an error that says who has the stage now.
            await self.stop_grace()
            kept = request.keep_slots and is_same
            successor = "a newer chain of its coordinator" if is_same else "another coordinator"
            error = StaleEpoch if is_same else PeerMismatch
            await self._leave(error(f"The stage was taken over by {successor}."))
            with self.watch.running():
                if not kept:
                    await self._stage.reset()
                await self._stage.place(request.index, request.num_stages)
            # Whoever configured the stage last owns it, also while no stream is open yet.
            self._owner = claim
            self.position = PipelineStage(
                self._stage, self.watch, chain, request.index, request.next_address, self._security
            )
            self.start_grace(self.grace_s)
        return kept

    def abandon(self, position: PipelineStage, outbox: Outbox, grace_s: float) -> None:
        """Note that the coordinator has left, and free its slots if it does not come back in time."""
        if position.coordinator is not outbox:
            return
        position.coordinator = None
        if position is self.position:
            self.start_grace(grace_s)

    def start_grace(self, grace_s: float) -> None:
        """Free the slots if no coordinator opens its stream in time, counted from now."""
        if self.position is None or self.position.coordinator is not None:
            return
        if self._abandoned is not None:
            self._abandoned.cancel()
        self._abandoned = asyncio.create_task(self._free(self.position, grace_s))

    async def stop_grace(self) -> None:
        """Forget that the coordinator had left."""
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None:
            abandoned.cancel()
            await asyncio.wait({abandoned})

    async def aclose(self) -> None:
        """Cut all streams and stop what runs for them."""
        await self.stop_grace()
        async with self.changing:
            await self._leave(draining())
        await self.stop_grace()

    def _is_same(self, before: PipelineStage | None, chain: ChainId, claim: Claim) -> bool:
        """Return whether a chain is of the coordinator that has the stage; its name alone proves nothing."""
        is_named = before is not None and before.chain.coordinator == chain.coordinator
        return is_named and claim.equals(self._owner)

    def _check_change(
        self, before: PipelineStage | None, chain: ChainId, claim: Claim, *, is_same: bool, takeover: bool
    ) -> None:
        if self.is_draining and not is_same:
            raise draining()
        if before is None or (takeover and (is_same or claim.may_take_from(self._owner))):
            return
        if is_same and chain.number <= before.chain.number:
            raise StaleEpoch(f"Chain {before.chain.number} of this coordinator has replaced chain {chain.number}.")
        if not is_same and before.coordinator is not None:
            raise PeerMismatch("The stage serves another coordinator; stop that one first.")

    async def _leave(self, error: SpecSplitError | None) -> None:
        position, self.position = self.position, None
        if position is not None:
            self._sent_bytes += position.sent_bytes
            await position.aclose(error)

    async def _free(self, position: PipelineStage, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        # From here on the task is not cancelled any more: half a reset would leave slots that nobody owns.
        self._abandoned = None
        async with self.changing:
            if self.position is position and position.coordinator is None:
                # The stage before hears of it too, maybe before it is told, and takes an end without a word for a loss.
                await self._leave(StaleEpoch("The coordinator of this chain has left."))
                with self.watch.running():
                    await self._stage.reset()
