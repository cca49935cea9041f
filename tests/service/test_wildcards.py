"""`[::]` is every address of this machine, of both IP versions, for every port: HTTP, Prometheus and gRPC."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from starlette.responses import PlainTextResponse

from specsplit.core.errors import InvalidSettings
from specsplit.gateway.server import serving_http
from specsplit.rpc.credentials import Security
from specsplit.rpc.listening import check_free
from specsplit.rpc.metrics_port import metrics_port
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from tests.support.fakes import FakeTarget

OPEN = Security(is_insecure=True)
pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")


@asynccontextmanager
async def listening(kind: str, host: str) -> AsyncGenerator[int]:
    """Serve a port of one kind at `host`, and yield its number."""
    async with AsyncExitStack() as stack:
        if kind == "http":
            address = (
                await stack.enter_async_context(serving_http(PlainTextResponse(""), host.strip("[]"), 0))
            ).address
        elif kind == "metrics":
            address = await stack.enter_async_context(metrics_port(f"{host}:0", lambda: b""))
        else:
            server = await stack.enter_async_context(serving(f"{host}:0", [TargetService(FakeTarget())], security=OPEN))
            address = server.address
        yield int(address.rpartition(":")[2])


async def is_reached(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("kind", ["http", "metrics", "grpc"])
async def test_the_wildcard_of_ipv6_takes_connections_of_both_versions(kind: str) -> None:
    async with listening(kind, "[::]") as port:
        assert [await is_reached(host, port) for host in ("::1", "127.0.0.1")] == [True, True]
    async with listening(kind, "[::1]") as port:
        assert [await is_reached(host, port) for host in ("::1", "127.0.0.1")] == [True, False]


async def test_a_port_of_ipv4_is_in_the_way_of_the_wildcard_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        await check_free("::1", port)
        with pytest.raises(InvalidSettings, match=rf"\[::\]:{port} is in use"):
            await check_free("::", port)
