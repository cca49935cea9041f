"""A TCP proxy that adds a round trip and counts bytes.

Sits between any client and any server; knows bytes only. Both directions get the same latency.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

_CHUNK_BYTES = 1 << 16
_WINDOW_CHUNKS = 64
"""Chunks under way in one direction; a sender that is faster waits."""


class Proxy:
    """Forwards connections from `address` to `target`, both HOST:PORT; use it as an async context.

    `latency_s` is one way: a round trip takes twice as long.
    """

    def __init__(self, target: str, latency_s: float = 0.0) -> None:
        host, _, target_port = target.rpartition(":")
        self._target = (host.strip("[]"), int(target_port))
        self.latency_s = latency_s
        self.sent_bytes = 0
        """From the client to the server."""
        self.received_bytes = 0
        self.num_connections = 0
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def carried(self, data: bytes, due_s: float) -> tuple[bytes, float] | None:
        """Return what arrives of a piece, and when, which is not before `due_s`; None if it is lost."""
        return data, max(due_s, asyncio.get_running_loop().time() + self.latency_s)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.cut()

    async def cut(self) -> None:
        """Break all connections; new ones are accepted."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        self.num_connections += 1
        try:
            upstream, upstream_writer = await asyncio.open_connection(*self._target)
            writers.append(upstream_writer)
            there = asyncio.create_task(self._pump(reader, upstream_writer, is_sending=True))
            back = asyncio.create_task(self._pump(upstream, writer, is_sending=False))
            try:
                await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        except OSError:
            pass  # the server is not there: the client sees its connection break
        finally:
            for each in writers:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sending: bool) -> None:
        """Carry one direction until it ends."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[bytes, float] | None] = asyncio.Queue(_WINDOW_CHUNKS)

        async def deliver() -> None:
            while (piece := await pieces.get()) is not None:
                data, due_s = piece
                if (wait_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()

        delivery = asyncio.create_task(deliver())
        due_s = 0.0
        try:
            while data := await reader.read(_CHUNK_BYTES):
                if is_sending:
                    self.sent_bytes += len(data)
                else:
                    self.received_bytes += len(data)
                if (carried := self.carried(data, due_s)) is not None:
                    due_s = carried[1]
                    await pieces.put(carried)
            await pieces.put(None)
            await delivery
        except OSError:
            pass  # one end is gone; the other end hears of it when the connection is taken down
        finally:
            delivery.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await delivery
