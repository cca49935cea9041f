"""Streams of rounds, written and served as a test wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc

from specsplit.core.types import Proposal, Turn, Verdict
from specsplit.rpc import calls
from specsplit.rpc.pb import common_pb2
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeTarget
from tests.support.rpc_servers import LOOPBACK

ROUNDS = "/specsplit.v1.TargetService/Rounds"


class Gated(FakeTarget):
    """A target whose sessions each wait for a gate of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting: list[str] = []

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        gate = self.gates.get(turn.session)
        if gate is not None:
            self.waiting.append(turn.session)
            try:
                await gate.wait()
            finally:
                self.waiting.remove(turn.session)
        return await super().verify(turn, proposal)


def request_of(turn: Turn) -> bytes:
    return calls.encode_verify_request(turn, without_tree(turn)).SerializeToString()


def round_of(call_id: int, turn: Turn | None = None, *, withdraws: bool = False) -> bytes:
    if turn is not None:
        return common_pb2.RoundCall(id=call_id, request=request_of(turn)).SerializeToString()
    withdraw = common_pb2.Withdraw() if withdraws else None
    return common_pb2.RoundCall(id=call_id, withdraw=withdraw).SerializeToString()


async def read_all(call: Any) -> list[bytes]:
    return [data async for data in call]


async def told(call: Any) -> list[common_pb2.RoundAnswer]:
    """Return all answers of a stream that the client has ended."""
    await call.done_writing()
    return [common_pb2.RoundAnswer.FromString(data) for data in await read_all(call)]


@asynccontextmanager
async def serving_rounds(
    serve: Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]],
) -> AsyncIterator[str]:
    """Serve nothing but streams of rounds, in a way of the test's own."""
    server = grpc.aio.server()
    methods = {"Rounds": cast(Any, grpc.stream_stream_rpc_method_handler)(serve)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("specsplit.v1.TargetService", methods)])
    port = server.add_insecure_port(LOOPBACK)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
