"""The bad network that fault tests and benchmarks put between processes: each condition does what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.support.bad_network import BadNetwork, Conditions


@asynccontextmanager
async def echo_behind(conditions: Conditions | None = None, seed: int = 0) -> AsyncGenerator[BadNetwork]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        async with BadNetwork(f"{host}:{port}", conditions, seed=seed) as proxy:
            yield proxy
    finally:
        server.close()


async def connect(proxy: BadNetwork) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_bytes_pass_unchanged_and_are_counted() -> None:
    data = bytes(range(256)) * 2000
    async with echo_behind() as proxy:
        reader, writer = await connect(proxy)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        assert (proxy.sent_bytes, proxy.received_bytes, proxy.num_connections) == (len(data), len(data), 1)
        writer.close()


async def test_latency_holds_each_piece_back_both_ways() -> None:
    async with echo_behind(Conditions(latency_s=0.05, jitter_s=0.01)) as proxy:
        reader, writer = await connect(proxy)
        loop = asyncio.get_running_loop()
        before = loop.time()
        writer.write(b"x")
        await reader.readexactly(1)
        assert loop.time() - before >= 0.1
        writer.close()


async def test_bandwidth_bounds_what_arrives() -> None:
    async with echo_behind(Conditions(bytes_per_s=1e6)) as proxy:
        reader, writer = await connect(proxy)
        loop = asyncio.get_running_loop()
        before = loop.time()
        writer.write(bytes(100_000))
        await reader.readexactly(100_000)
        assert loop.time() - before >= 0.1
        writer.close()


async def test_a_cut_breaks_what_there_is_and_lets_new_connections_in() -> None:
    async with echo_behind() as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"x")
        await reader.readexactly(1)
        await proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        reader, writer = await connect(proxy)
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        writer.close()


async def test_refusing_is_a_closed_port_until_it_is_opened_again() -> None:
    async with echo_behind() as proxy:
        address = proxy.address
        await proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await connect(proxy)
        await proxy.open()
        assert proxy.address == address
        reader, writer = await connect(proxy)
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        writer.close()


async def test_a_black_hole_swallows_in_silence() -> None:
    async with echo_behind() as proxy:
        reader, writer = await connect(proxy)
        proxy.set(is_black_hole=True)
        writer.write(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.1)
        assert proxy.sent_bytes == 1
        writer.close()


async def test_corruption_flips_one_bit_and_repeats_with_its_seed() -> None:
    async def spoilt(seed: int) -> bytes:
        async with echo_behind(Conditions(corruption=1.0), seed=seed) as proxy:
            reader, writer = await connect(proxy)
            writer.write(bytes(64))
            answer = await reader.readexactly(64)
            writer.close()
            return answer

    assert sum(byte.bit_count() for byte in await spoilt(1)) in (0, 2)  # one flip each way, which may undo each other
    assert await spoilt(1) == await spoilt(1)


def test_impossible_conditions_are_refused() -> None:
    for wrong in ({"latency_s": -1}, {"corruption": 2}, {"bytes_per_s": 0}):
        with pytest.raises(ValueError, match="conditions"):
            Conditions(**wrong)
