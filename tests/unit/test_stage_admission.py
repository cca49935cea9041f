"""A stage counts as lost when it is, and not when the connection to it has just been cut."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from specsplit.core.errors import PeerMismatch, SpecSplitError, WorkerUnreachable
from specsplit.stages.identity import ExpectedChain
from specsplit.stages.wire.admission import why_lost
from specsplit.stages.wire.peer import StagePeer


class _Identity:
    layers, weights_hash = "2:5", "abc"


class _Ping:
    computing_s, identity = 0.0, _Identity()


class _Peer:
    """Fails as told, one ping after the other, and then answers."""

    address = name = "the stage"
    identity = _Identity()

    def __init__(self, *failures: SpecSplitError, slow_s: float = 0.0) -> None:
        self.failures, self.slow_s = list(failures), slow_s
        self.num_renewed = 0

    async def ping(self, timeout_s: float) -> _Ping:
        await asyncio.sleep(self.slow_s)
        if self.failures:
            raise self.failures.pop(0)
        return _Ping()

    async def renew(self) -> None:
        self.num_renewed += 1

    def admit(self, ping: object) -> None: ...


class _Wanted:
    def check_stage(self, address: str, identity: object) -> None: ...

    def check_memory(self, address: str, identity: object, like: object) -> None: ...


async def found(peer: Any) -> SpecSplitError | None:
    return await why_lost(cast(StagePeer, peer), cast(ExpectedChain, _Wanted()), 1.0)


async def test_a_call_on_a_cut_connection_is_repeated_over_a_new_one() -> None:
    peer = _Peer(WorkerUnreachable("the connection was cut"))
    assert await found(peer) is None
    assert peer.num_renewed == 1


async def test_a_stage_that_is_not_there_either_is_lost() -> None:
    peer = _Peer(*(WorkerUnreachable("nobody listens") for _ in range(3)))
    error = await found(peer)
    assert isinstance(error, WorkerUnreachable)
    assert "layers 2:5 is lost: nobody listens" in str(error)
    assert (peer.num_renewed, len(peer.failures)) == (2, 1)


async def test_a_stage_that_let_us_wait_is_not_asked_again() -> None:
    peer = _Peer(WorkerUnreachable("no answer"), slow_s=0.35)
    assert isinstance(await found(peer), WorkerUnreachable)
    assert peer.num_renewed == 1


async def test_one_that_is_another_is_not_asked_again() -> None:
    peer = _Peer(PeerMismatch("other weights"))
    assert isinstance(await found(peer), PeerMismatch)
    assert peer.num_renewed == 0
