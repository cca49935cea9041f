"""The calls of a stage to which no connection leads: they end, fail and are late as those over one do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, WorkerFailed, WorkerUnreachable
from specsplit.rpc.auth import Guard, current_peer
from specsplit.rpc.channel import Duplex
from specsplit.stages.wire.connection import Connection
from specsplit.stages.wire.frames import ChainId
from specsplit.stages.wire.next_stage import NextUnreachable
from specsplit.stages.wire.own_stage import OwnChannel, OwnStage


class Service(grpc.GenericRpcHandler):
    """Echoes what streams in, fails where it is told to, says who calls, and never answers other calls."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        make: Any = grpc
        if handler_call_details.method.endswith("Forward"):
            return make.stream_stream_rpc_method_handler(self._echo)
        if handler_call_details.method.endswith("Configure"):
            return make.unary_unary_rpc_method_handler(self._caller)
        if handler_call_details.method.endswith("EndSession"):
            return make.unary_unary_rpc_method_handler(self._fail)
        return make.unary_unary_rpc_method_handler(self._hang)

    async def _caller(self, data: bytes, context: object) -> bytes:
        return current_peer().name.encode()

    async def _fail(self, data: bytes, context: object) -> bytes:
        raise InvalidRequest("This is refused.") if data == b"ours" else KeyError("lost")

    async def _hang(self, data: bytes, context: object) -> bytes:
        await asyncio.Event().wait()
        return data

    async def _echo(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        try:
            async for data in requests:
                if data == b"ours":
                    raise InvalidRequest("This is refused.")
                if data == b"other":
                    raise KeyError("lost")
                yield current_peer().name.encode() if data == b"who" else data
        finally:
            self.has_ended.set()


def opened(service: Service) -> Duplex:
    return OwnChannel(service).duplex("/specsplit.v1.StageService/Forward")


async def test_what_is_written_comes_in_order_and_ends_when_the_writer_ends() -> None:
    call = opened(Service())
    for data in (b"1", b"2"):
        await call.write(data)
    await call.end()
    assert [await call.read() for _ in range(3)] == [b"1", b"2", None]
    with pytest.raises(WorkerUnreachable):
        await call.write(b"3")


@pytest.mark.parametrize(("sent", "error"), [(b"ours", InvalidRequest), (b"other", WorkerUnreachable)])
async def test_an_error_reaches_the_reader_and_nothing_waits_behind_it(sent: bytes, error: type[Exception]) -> None:
    call = opened(Service())
    await call.write(sent)
    with pytest.raises(error):
        await call.read()
    with pytest.raises(WorkerUnreachable):
        await call.read()
    with pytest.raises(WorkerUnreachable):
        await call.write(b"1")


async def test_a_call_that_is_broken_off_ends_the_stages_side() -> None:
    service = Service()
    call = opened(service)
    await call.write(b"1")
    assert await call.read() == b"1"
    call.cancel()
    await service.has_ended.wait()


async def test_a_call_that_is_not_answered_in_time_is_late() -> None:
    with pytest.raises(DeadlineExceeded, match="own stage did not answer"):
        await OwnStage(Service()).ping(0.01)


@pytest.mark.parametrize(("sent", "error"), [(b"ours", InvalidRequest), (b"other", WorkerFailed)])
async def test_the_error_of_a_call_is_one_of_ours(sent: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        await OwnChannel(Service()).call("/specsplit.v1.StageService/EndSession", sent, 60.0)


class Peer:
    """A stage of a chain: our own if there is a service, else one that cannot reach the next."""

    address = name = "127.0.0.1:1"

    def __init__(self, service: Service | None = None) -> None:
        self.service = service

    async def configure(self, *chain: object, **options: object) -> None:
        await asyncio.sleep(0)

    async def stream(self, chain: ChainId) -> Duplex:
        if self.service is None:
            raise NextUnreachable("It cannot be reached.")
        call = opened(self.service)
        await call.write(b"1")
        assert await call.read() == b"1"
        return call


async def test_a_chain_that_cannot_be_opened_ends_the_call_of_its_own_stage() -> None:
    service = Service()
    peers: Any = [Peer(service), Peer(), Peer()]
    connection = Connection(ChainId("a coordinator", 1), peers, lambda peer: None)
    with pytest.raises(NextUnreachable, match="Stage 1 cannot reach stage 2"):
        await connection.open(keep_slots=False, takeover=False)
    async with asyncio.timeout(60):
        await service.has_ended.wait()


async def test_a_chain_restored_for_a_request_is_not_that_of_its_peer() -> None:
    """A packet of a request makes the chain anew in the context of the request's call, where the peer is a gateway."""
    proved: Any = SimpleNamespace(auth_context=lambda: {"peer_uri": [b"spiffe://specsplit/gateway"]})
    Guard(is_secure=True).admit(proved, "/specsplit.v1.TargetService/Ping")
    assert current_peer().role == "gateway"
    service = Service()
    assert await OwnChannel(service).call("/specsplit.v1.StageService/Configure", b"", 60.0) == b""
    call = opened(service)
    await call.write(b"who")
    assert await call.read() == b""
    call.cancel()
    await service.has_ended.wait()
