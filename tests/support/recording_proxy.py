"""A proxy before a worker that keeps every byte which passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from tests.support.processes import WorkerProcess
from tests.support.rpc_servers import CountingProxy


class RecordingProxy(CountingProxy):
    """Forwards TCP and keeps every byte."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.seen = bytearray()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sent: bool) -> None:
        inner = asyncio.StreamReader()
        pump = asyncio.create_task(super()._pump(inner, writer, is_sent=is_sent))
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.seen += data
                inner.feed_data(data)
        inner.feed_eof()
        await pump


@asynccontextmanager
async def recorded(worker: WorkerProcess) -> AsyncGenerator[RecordingProxy]:
    async with RecordingProxy(int(worker.address.rpartition(":")[2])).running() as proxy:
        yield proxy
