"""A TCP proxy that is a bad network: latency, jitter, bandwidth, cuts, silence, refusals, flipped bits.

Sits between any client and any server; knows bytes only. Both directions get the same conditions.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, replace
from typing import Any, Self

_CHUNK_BYTES = 1 << 16
_WINDOW_CHUNKS = 64
"""Chunks under way in one direction; a sender that is faster waits."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The treatment of the bytes of one direction; it may be exchanged while they flow."""

    latency_s: float = 0.0
    """One way: a round trip takes twice as long."""
    jitter_s: float = 0.0
    """Added to the latency of each piece, uniformly from 0; pieces never overtake each other, as TCP's do not."""
    bytes_per_s: float | None = None
    corruption: float = 0.0
    """The chance that one byte of a piece is flipped."""
    is_black_hole: bool = False
    """Nothing arrives any more and nobody is told; what was swallowed stays lost, so the connection cannot go on."""

    def __post_init__(self) -> None:
        numbers = (self.latency_s, self.jitter_s, self.corruption, self.bytes_per_s or 0.0)
        if min(numbers) < 0 or self.corruption > 1 or self.bytes_per_s == 0:
            raise ValueError(f"conditions must not be negative, nor a chance above 1: {self}")


class Proxy:
    """Forwards connections from `address` to `target`, both HOST:PORT; use it as an async context.

    `port` 0 takes a free one. The same seed gives the same jitter and corruption for the same pieces.
    """

    def __init__(self, target: str, conditions: Conditions | None = None, *, port: int = 0, seed: int = 0) -> None:
        host, _, target_port = target.rpartition(":")
        self._target = (host.strip("[]"), int(target_port))
        self.conditions = conditions or Conditions()
        self.sent_bytes = 0
        """From the client to the server."""
        self.received_bytes = 0
        self.num_connections = 0
        self._port = port
        self._rng = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def set(self, **changes: Any) -> None:
        """Exchange some of the conditions, for connections that exist as well."""
        self.conditions = replace(self.conditions, **changes)

    async def open(self) -> None:
        """Accept connections, after `refuse` on the same port again."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Cut what there is and refuse new connections until `open`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.cut()

    async def cut(self) -> None:
        """Break all connections; new ones are accepted."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.refuse()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        writers = [writer]
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
        pieces: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue(_WINDOW_CHUNKS)

        async def deliver() -> None:
            while (piece := await pieces.get()) is not None:
                due_s, data = piece
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
                now = self.conditions
                if now.is_black_hole:
                    continue
                delay_s = now.latency_s + (self._rng.uniform(0, now.jitter_s) if now.jitter_s else 0.0)
                due_s = max(due_s, loop.time() + delay_s)
                if now.bytes_per_s is not None:
                    due_s += len(data) / now.bytes_per_s
                await pieces.put((due_s, self._corrupted(data)))
            await pieces.put(None)
            await delivery
        except OSError:
            pass  # one end is gone; the other end hears of it when the connection is taken down
        finally:
            delivery.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await delivery

    def _corrupted(self, data: bytes) -> bytes:
        if not self.conditions.corruption or self._rng.random() >= self.conditions.corruption:
            return data
        spoilt = bytearray(data)
        spoilt[self._rng.randrange(len(spoilt))] ^= 1 << self._rng.randrange(8)
        return bytes(spoilt)
