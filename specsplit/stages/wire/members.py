"""The stages of a chain in their order, and the spares: who they are, who fits in whose place. Knows no connections."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, PeerMismatch, SpecSplitError, WorkerUnreachable
from specsplit.core.exactness import Exactness, joint_exactness, joint_numerics
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.stages.identity import ExpectedChain, StageIdentity
from specsplit.stages.wire.admission import PING_S, admit, ping_all, why_lost
from specsplit.stages.wire.next_stage import NextUnreachable
from specsplit.stages.wire.options import LinkOptions
from specsplit.stages.wire.peer import StagePeer, StagePing


class ChainMembers:
    """`stages` and `spares`, which change places when a stage is replaced; all of them are `expected` to fit."""

    def __init__(
        self,
        stages: Sequence[str],
        spares: Sequence[str],
        expected: ExpectedChain,
        security: Security = ON_LOOPBACK,
        own: StagePeer | None = None,
    ) -> None:
        """Name them; `own` is a first stage of this process."""
        addresses = [*stages, *spares]
        for address in addresses:
            if addresses.count(address) > 1:
                raise InvalidRequest(f"The stage at {address} is named twice.", param="stages")
        self.stages = [*filter(None, [own]), *(StagePeer(address, security) for address in stages)]
        self.spares = [StagePeer(address, security) for address in spares]
        self.spares_used: list[str] = []
        """Addresses of spares that took a stage's place, in that order."""
        self.options = LinkOptions()
        """Patience of the chain that they are members of."""
        self.revision = 0
        """Changes of the stages' joint numerics since they were connected first."""
        self._numerics: tuple[Exactness, str] | None = None
        """Joint exactness and numerics of the stages that were connected last."""
        self._expected = expected
        self._connected = list(self.stages)
        """The stages that were connected last; before that, those that were named."""
        self._replaced: dict[int, SpecSplitError] = {}
        """Why a spare that has not been connected yet stands at an index."""
        self._tried: list[StagePeer] = []
        """Members that did not serve where they stood, since the chain was connected last."""

    @property
    def all(self) -> list[StagePeer]:
        return [*self.stages, *self.spares]

    @property
    def addresses(self) -> list[str]:
        return [peer.address for peer in self.stages]

    @property
    def identities(self) -> list[StageIdentity]:
        """Return who the stages are, in their order; none before `admit_all`."""
        return [peer.identity for peer in self.stages if peer.identity is not None]

    @property
    def num_slots(self) -> int:
        return self._expected.num_slots

    async def admit_all(self) -> None:
        """Look at every stage and spare, and check that they fit; a spare takes the place of a stage that is away.

        Raises:
            PeerMismatch: one does not fit, and why.
            LinkError: a stage cannot be reached, and no spare has its layers. A spare that cannot is left for later.
        """
        pings, errors = await ping_all(self.all)
        self._fill_places(pings, errors)
        found = [(peer.address, pings[peer].identity) for peer in self.stages]
        await asyncio.to_thread(self._expected.check_chain, found)
        self._expected = self._expected.settled(found[0][1])
        for peer in self.stages:
            peer.admit(pings[peer])
        for spare in self.spares:
            if spare in pings:
                with suppress(WorkerUnreachable, DeadlineExceeded):
                    await self._admit_spare(spare, pings[spare].identity)

    def _fill_places(self, pings: Mapping[StagePeer, StagePing], errors: Mapping[StagePeer, SpecSplitError]) -> None:
        """Put spares in the place of stages that did not answer; the layers of those follow from the stage before."""
        start = 0
        for index, peer in enumerate(list(self.stages)):
            if (error := errors.get(peer)) is not None:
                fitting = [spare for spare in self.spares if spare in pings and pings[spare].identity.start == start]
                if not fitting:
                    raise error
                self.swap(index, fitting[0], error)
            start = pings[self.stages[index]].identity.end

    async def admit(self, peer: StagePeer, like: StageIdentity) -> None:
        """Look at a stage anew, and check that it fits in the place of `like`; raises as `admit_all` does."""
        await admit(peer, like, self._expected, self.options.step_timeout_s)

    async def replace_lost(self) -> None:
        """Look at every stage anew, and put spares in the place of those that cannot serve any more.

        Raises:
            SpecSplitError: why a stage is lost for which there is no spare.
        """
        for peer in self.all:
            peer.is_awaited = False
        limit_s = self.options.step_timeout_s
        errors = await asyncio.gather(*(why_lost(peer, self._expected, limit_s) for peer in self.stages))
        for index, error in enumerate(errors):
            if error is not None and not await self._replace(index, error):
                raise error
            if error is None and (peer := self.stages[index]).is_failing:  # better than none
                await self._replace(index, WorkerUnreachable(f"{peer.name} fails in every step."), by_failing=False)

    async def replace_suspect(self, error: SpecSplitError) -> None:
        """Put another spare in the place of one that kept the chain from being connected with `error`.

        Raises:
            SpecSplitError: why the stage there was replaced, if no other spare is left; `error`, if it was by no spare.
        """
        # A stage that may not or cannot dial the next one says nothing of which of the two does not belong there.
        reach = 1 + isinstance(error, InvalidRequest | NextUnreachable)
        near = {at + step for at, peer in enumerate(self.stages) if peer.is_suspect for step in range(reach)}
        places = sorted(near & self._replaced.keys())
        if not places and isinstance(error, NextUnreachable):
            # The coordinator reaches both stages, and the one does not reach the next: only a spare can help.
            places = [self.addresses.index(error.address)]
        for index in places:
            peer, reason = self.stages[index], self._replaced.get(index, error)
            self._tried.append(peer)
            if await self._replace(index, reason):
                return
            if reason is not error:
                error = type(reason)(f"{reason} {peer.name} does not help: {error}")
        raise error

    async def _replace(self, index: int, reason: SpecSplitError, *, by_failing: bool = True) -> bool:
        """Put a spare that fits in the place of a stage, and return whether there was one.

        One whose own steps fail comes last, or not at all unless `by_failing`.
        """
        fitting = [spare for spare in await self._fitting_spares(self.stages[index]) if spare not in self._tried]
        fitting.sort(key=lambda spare: spare.is_failing)
        if not fitting or (fitting[0].is_failing and not by_failing):
            return False
        self.swap(index, fitting[0], reason)
        return True

    async def is_failing(self, peer: StagePeer) -> bool:
        """Whether every step of a stage fails while a spare could take its place."""
        try:
            is_failing = (await peer.ping(PING_S)).is_failing
        except SpecSplitError:  # its streams tell of one that does not answer
            return False
        return is_failing and any(not spare.is_failing for spare in await self._fitting_spares(peer))

    async def _fitting_spares(self, lost: StagePeer) -> list[StagePeer]:
        assert lost.identity is not None, "a chain is connected before it is restored"
        fitting = []
        # Identity and weights are checked again: another process may have taken a spare's address.
        for spare in list(self.spares):
            try:
                await self.admit(spare, lost.identity)
            except PeerMismatch:
                continue
            except SpecSplitError:
                await spare.renew()
                continue
            if not spare.is_draining:
                fitting.append(spare)
        return fitting

    def swap(self, index: int, spare: StagePeer, reason: SpecSplitError) -> None:
        """Let a spare stand at `index`, and its predecessor stand by: for good once the chain is connected so."""
        self.spares[self.spares.index(spare)] = self.stages[index]
        self.stages[index] = spare
        self._replaced.setdefault(index, reason)

    @contextmanager
    def undone_on_failure(self) -> Generator[None]:
        """Let those that were connected last stand in their places again if the block fails to connect others."""
        try:
            yield
        except BaseException:
            spares = [peer for peer in self.all if peer not in self._connected]
            # The next try begins with spares that have not failed: one that hangs would use its time up again.
            spares.sort(key=lambda spare: spare in self._tried or spare.is_suspect)
            self.stages, self.spares = list(self._connected), spares
            self._replaced, self._tried = {}, []
            raise

    def note_connected(self) -> None:
        """Count spares and changes of the stages' numerics; called for every connection, since packets need one."""
        both = zip(self.stages, self._connected, strict=True)
        self.spares_used += [peer.address for peer, before in both if peer is not before]
        self._connected = list(self.stages)
        self._replaced, self._tried = {}, []
        identities = self.identities
        now = joint_exactness(identities), joint_numerics(identities)
        self.revision += self._numerics not in (None, now)
        self._numerics = now

    async def aclose(self) -> None:
        """Close the connections to all of them."""
        for peer in self.all:
            await peer.aclose()

    async def _admit_spare(self, spare: StagePeer, identity: StageIdentity) -> None:
        for like in self.identities:
            if like.layers == identity.layers:
                return await self.admit(spare, like)
        raise PeerMismatch(f"The spare at {spare.address} has layers {identity.layers}, which no stage here has.")


def find(peers: Sequence[StagePeer], address: str) -> StagePeer:
    """Return the one of `peers` at an address; raises InvalidRequest if there is none."""
    for peer in peers:
        if peer.address == address:
            return peer
    raise InvalidRequest(f"There is no stage at {address} here that could be moved so.", param="address")
