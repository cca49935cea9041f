"""A hundred HTTP clients that take nothing of their streams: their texts stand still, and nobody else's do."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from specsplit.rpc.worker_statistics import StatisticsReader
from specsplit.telemetry.statistics import WorkerStatistics
from tests.support.gateways import GatewayProcess
from tests.support.long_target import long_folder
from tests.support.processes import LIMIT_S, WorkerProcess

NUM_SLOW, CONTEXT = 100, 900
QUICK: dict[str, Any] = {
    "model": "code",
    "prompt": [5, 6, 7, 8],
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}
SLOW: dict[str, Any] = {**QUICK, "max_tokens": CONTEXT - 100, "stream": True, "logprobs": 20}


@dataclass(frozen=True)
class Served:
    """A gateway and its target, which has a slot for every reader."""

    gateway: GatewayProcess
    reader: StatisticsReader

    async def target(self) -> WorkerStatistics:
        reading = await self.reader.read(LIMIT_S)
        assert reading is not None
        return reading.statistics

    async def ask(self) -> tuple[str, int, int]:
        """Return a text, and the steps and rows that the target forwarded meanwhile."""
        before = (await self.target()).steps
        async with httpx.AsyncClient(base_url=self.gateway.url, timeout=LIMIT_S) as client:
            answer = (await client.post("/v1/completions", json=QUICK)).json()
        after = (await self.target()).steps
        return answer["choices"][0]["text"], after.num_steps - before.num_steps, after.num_rows - before.num_rows


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[GatewayProcess, WorkerProcess]]:
    options = ("--model", str(long_folder()), "--context", str(CONTEXT), "--prefix-reuse", "off")
    target = WorkerProcess("target", tmp_path, *options, "--threads", "1", "--sessions", str(NUM_SLOW + 4))
    # A busy machine may need longer than a reader is waited for.
    links = ("--target", f"code={target.address}", "--mode", "plain")
    gateway = GatewayProcess(tmp_path, *links, module="tests.support.patient_gateway")
    yield gateway, target
    gateway.close()
    target.close()


@asynccontextmanager
async def slow_reader(gateway: GatewayProcess) -> AsyncGenerator[asyncio.StreamReader]:
    """Ask for a long stream over a connection that holds little, and read its first event."""
    host, port = gateway.ready["address"].rsplit(":", 1)
    connection = socket.socket()
    # Over loopback the kernel would take in the whole stream; small segments keep its buffers small.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    content = json.dumps(SLOW).encode()
    writer.write(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    try:
        await reader.readuntil(b"data: ")
        yield reader
    finally:
        writer.close()


@pytest.mark.slow
async def test_a_hundred_slow_readers_delay_nobody(processes: tuple[GatewayProcess, WorkerProcess]) -> None:
    gateway, target = processes
    served = Served(gateway, StatisticsReader("target", target.address))
    alone = await served.ask()
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        opening = (stack.enter_async_context(slow_reader(gateway)) for _ in range(NUM_SLOW))
        readers = await asyncio.gather(*opening)
        # Their texts go on until the buffers between are full. From then on a text beside them takes the steps that it
        # takes alone, and nobody else has a row in these.
        while (beside := await served.ask()) != alone:
            assert beside[0] == alone[0]
        assert (await served.target()).num_sessions == NUM_SLOW
        assert [await served.ask() for _ in range(5)] == [alone] * 5
        assert await readers[0].read(1 << 16), "one that reads on gets more"
    await served.reader.aclose()
