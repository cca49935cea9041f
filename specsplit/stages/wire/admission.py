"""Whether a stage may serve at a position of a chain: it answers, computes and is the expected one. Knows no chains."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from specsplit.core.errors import DeadlineExceeded, PeerMismatch, SpecSplitError, WorkerUnreachable
from specsplit.stages.identity import ExpectedChain, StageIdentity
from specsplit.stages.wire.peer import StagePeer, StagePing

PING_S = 1.0
_AT_ONCE_S = 0.3


async def ping_all(peers: Sequence[StagePeer]) -> tuple[dict[StagePeer, StagePing], dict[StagePeer, SpecSplitError]]:
    """Return the answers of stages, and the errors of those that cannot be reached; raises PeerMismatch."""
    results = await asyncio.gather(*(peer.ping() for peer in peers), return_exceptions=True)
    pings, errors = dict[StagePeer, StagePing](), dict[StagePeer, SpecSplitError]()
    for peer, result in zip(peers, results, strict=True):
        if isinstance(result, StagePing):
            pings[peer] = result
        elif isinstance(result, WorkerUnreachable | DeadlineExceeded):
            errors[peer] = result
        else:
            raise result
    return pings, errors


async def admit(peer: StagePeer, like: StageIdentity, expected: ExpectedChain, step_timeout_s: float) -> None:
    """Ping a stage, and check that it fits in the place of `like`.

    Raises:
        PeerMismatch: it does not fit, and why.
        LinkError: it cannot be reached, or has been on one step for more than `step_timeout_s`.
    """
    ping = await peer.ping(PING_S)
    check_alive(peer, ping, step_timeout_s)
    # Comparing weights reads files, so it happens in a thread.
    identity = ping.identity
    await asyncio.to_thread(expected.check_stage, peer.address, identity)
    if identity.layers != like.layers:
        raise PeerMismatch(f"{peer.name} has layers {identity.layers}, and {like.layers} are needed in its place.")
    if identity.weights_hash != like.weights_hash:
        raise PeerMismatch(f"{peer.name} has other weights for layers {like.layers} than the stage there had.")
    expected.check_memory(peer.address, identity, like)
    peer.admit(ping)


async def why_lost(peer: StagePeer, expected: ExpectedChain, step_timeout_s: float) -> SpecSplitError | None:
    """Return why a stage of the chain cannot serve in its place any more, None if it can.

    A call that fails at once may have met the end of a connection that was lost with the chain, so it is made again
    over a new one: else one cut would cost a spare, and all that the stage holds.
    """
    like, loop = peer.identity, asyncio.get_running_loop()
    assert like is not None, "a chain is connected before it is restored"
    began_s, is_again = loop.time(), False
    while True:
        try:
            await admit(peer, like, expected, step_timeout_s)
        except PeerMismatch as error:
            return error
        except SpecSplitError as error:
            await peer.renew()
            if is_again or loop.time() - began_s > _AT_ONCE_S:
                return WorkerUnreachable(f"The stage of layers {like.layers} is lost: {error}")
            is_again = True
        else:
            return None


def check_alive(peer: StagePeer, ping: StagePing, step_timeout_s: float) -> None:
    """Raise WorkerUnreachable for a stage that answers pings while its step does not end."""
    if ping.computing_s > step_timeout_s:
        raise WorkerUnreachable(
            f"{peer.name} hangs: it has been computing one step for {ping.computing_s:.1f} s, and "
            f"{step_timeout_s:g} s are the limit."
        )


def not_answered(peers: Sequence[StagePeer], waited_s: float) -> WorkerUnreachable:
    """Return the error that names the stages whose answers were still awaited when the time was over."""
    names = " ".join(f"{peer.name} gave no answer." for peer in peers if peer.is_awaited)
    return WorkerUnreachable(f"The chain could not be restored in {waited_s:g} s. {names}".rstrip())


async def hanging(peers: Sequence[StagePeer], step_timeout_s: float) -> SpecSplitError | None:
    """Return the error of the first stage that hangs in a step, None if none is known to."""

    async def look(peer: StagePeer) -> SpecSplitError | None:
        with suppress(SpecSplitError):  # one that does not answer is found by its streams
            ping = await peer.ping(PING_S)
            try:
                check_alive(peer, ping, step_timeout_s)
            except WorkerUnreachable as error:
                return error
        return None

    found = await asyncio.gather(*(look(peer) for peer in peers))
    return next((error for error in found if error is not None), None)
