"""Workers served over loopback for tests, with clients on them, and a proxy that counts what goes over the wire.

Run as a module it serves a fake target in a process of its own and prints where.
"""

from __future__ import annotations

import asyncio
import math
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsplit.core.ports import Drafter, Verifier
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.server import Server, serving
from specsplit.rpc.servicers import DraftService, TargetService
from tests.support.fakes import FakeTarget
from tests.support.processes import LIMIT_S

LOOPBACK = "127.0.0.1:0"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def connected(drafter: Drafter, verifier: Verifier) -> AsyncIterator[tuple[RemoteDrafter, RemoteVerifier]]:
    """Serve the two on a port each, and give clients of them."""
    async with (
        serving(LOOPBACK, [DraftService(drafter)]) as draft,
        serving(LOOPBACK, [TargetService(verifier)]) as target,
        drafter_at(draft) as remote_drafter,
        verifier_at(target) as remote_verifier,
    ):
        yield remote_drafter, remote_verifier


@asynccontextmanager
async def drafter_at(server: Server | str) -> AsyncIterator[RemoteDrafter]:
    drafter = RemoteDrafter(server if isinstance(server, str) else server.address)
    try:
        yield drafter
    finally:
        await drafter.aclose()


@asynccontextmanager
async def verifier_at(server: Server | str, **options: Any) -> AsyncIterator[RemoteVerifier]:
    verifier = RemoteVerifier(server if isinstance(server, str) else server.address, **options)
    try:
        yield verifier
    finally:
        await verifier.aclose()


async def wait_until(holds: Callable[[], bool]) -> None:
    """Give the loop turns until `holds()`; a test that waits in vain fails."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - the state of another side, which sets no event here
            await asyncio.sleep(0.001)


async def duplex_status(begin: Callable[[], Any], *messages: bytes) -> grpc.StatusCode:
    """Send the messages on a call that streams both ways, and return the status that it ends with.

    A call that the server ends during a write has no status but INTERNAL from grpc.aio itself; it is begun again.
    """
    while True:
        call = begin()
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except asyncio.InvalidStateError:
            return await call.code()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core":
                continue
            return error.code()
        return grpc.StatusCode.OK


_PIECE_BYTES = 8192


class CountingProxy:
    """Forwards TCP to `port` and counts connections and the bytes of each direction.

    With `bytes_per_s` each direction of a connection is a link of that speed that holds little in between.
    """

    def __init__(self, port: int, bytes_per_s: float = math.inf) -> None:
        self._port, self._bytes_per_s = port, bytes_per_s
        self._writers = set[asyncio.StreamWriter]()
        self.num_connections = self.sent_bytes = self.received_bytes = 0
        self.address = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CountingProxy]:
        listening = socket.create_server(("127.0.0.1", 0))
        if self._is_slow:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PIECE_BYTES)
        server = await asyncio.start_server(self.serve_connection, sock=listening, limit=_PIECE_BYTES)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await self.wait_closed()

    @property
    def _is_slow(self) -> bool:
        return self._bytes_per_s < math.inf

    def cut(self) -> None:
        """Close every connection; new ones are made as before."""
        for writer in self._writers:
            writer.close()

    async def wait_closed(self) -> None:
        """Wait until no connection is left."""
        await wait_until(lambda: not self._writers)

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_PIECE_BYTES)
        self.num_connections += 1
        self._writers |= {writer, up_writer}
        await asyncio.gather(self._pump(reader, up_writer, is_sent=True), self._pump(up_reader, writer, is_sent=False))
        self._writers -= {writer, up_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sent: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES if self._is_slow else 1 << 16):
                if is_sent:
                    self.sent_bytes += len(data)
                else:
                    self.received_bytes += len(data)
                writer.write(data)
                await writer.drain()
                if self._is_slow:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
        writer.close()


async def _serve_alone() -> None:
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        sys.stdout.write(server.address + "\n")
        sys.stdout.flush()
        await server.wait()


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    """Return the status that a server says of a service by the health protocol."""
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


if __name__ == "__main__":
    asyncio.run(_serve_alone())
