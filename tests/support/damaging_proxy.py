"""A proxy before a worker that flips single bits of gRPC's messages, as a link in plaintext may."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from tests.support.packet_proxy import Message, Messages
from tests.support.rpc_servers import CountingProxy

_PREFIX_BYTES = 5


class DamagingProxy(CountingProxy):
    """Forwards TCP, and flips a bit of one in `every` messages, of both directions."""

    def __init__(self, port: int, every: int, seed: int) -> None:
        super().__init__(port)
        self.num_damaged = 0
        self._every, self._rng = every, random.Random(seed)

    def _passed(self, message: Message) -> bytes:
        data = bytearray(message.data)
        if len(data) > _PREFIX_BYTES and self._rng.randrange(self._every) == 0:
            self.num_damaged += 1
            data[self._rng.randrange(_PREFIX_BYTES, len(data))] ^= 1 << self._rng.randrange(8)
        return Message(message.stream, bytes(data)).frames()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sent: bool) -> None:
        messages = Messages(is_sent=is_sent)
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for piece in messages.read(data):
                    writer.write(piece if isinstance(piece, bytes) else self._passed(piece))
                await writer.drain()
        writer.close()
