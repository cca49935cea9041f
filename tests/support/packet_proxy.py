"""A proxy between coordinator and stages that knows packets: it damages, repeats, delays and swaps them on the wire.

It reads HTTP/2 just far enough to find gRPC's messages, passes everything else on as it is, and writes each message in
frames of its own; so a packet may be written twice or behind the next one, and both ends still see a sound connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from specsplit.core.errors import CorruptPacket
from specsplit.stages.codec import decode
from specsplit.stages.packet import Packet
from tests.support.rpc_servers import wait_until

LinkFault = Literal["corrupt", "twice", "again-later", "delayed", "swapped", "cut"]
DELAY_S = 0.02
_PREFACE_BYTES, _HEAD_BYTES, _FRAME_BYTES = 24, 9, 16384
_DATA, _RESET, _END_STREAM, _PADDED = 0, 3, 1, 8


@dataclass(frozen=True, slots=True)
class Message:
    """One gRPC message of one stream of a connection, its prefix of five bytes included."""

    stream: int
    data: bytes

    def frames(self) -> bytes:
        """Return the message as HTTP/2 has it."""
        pieces = [self.data[at : at + _FRAME_BYTES] for at in range(0, len(self.data), _FRAME_BYTES)]
        return b"".join(_frame(_DATA, 0, self.stream, piece) for piece in pieces)

    def packet(self) -> Packet | None:
        """Return the stage packet in it, if there is one."""
        at = self.data.find(b"SSPK", 0, 128)
        if at < 0:
            return None
        with suppress(CorruptPacket):
            return decode(self.data[at:])
        return None

    def damaged(self) -> Message:
        """Return it with a bit flipped in the middle of its packet."""
        damaged = bytearray(self.data)
        damaged[(self.data.find(b"SSPK", 0, 128) + len(damaged)) // 2] ^= 4
        return Message(self.stream, bytes(damaged))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class Messages:
    """Cuts one direction of a connection into gRPC messages and, as bytes, everything else."""

    def __init__(self, *, is_sent: bool) -> None:
        self.ended: set[int] = set()
        """Streams on which nothing follows."""
        self._unread = bytearray()
        self._skipped = _PREFACE_BYTES if is_sent else 0
        self._parts: dict[int, bytearray] = {}

    def read(self, data: bytes) -> Iterator[Message | bytes]:
        """Give what has become whole, in order."""
        self._unread += data
        if self._skipped and len(self._unread) >= self._skipped:
            yield bytes(self._unread[: self._skipped])
            del self._unread[: self._skipped]
            self._skipped = 0
        while not self._skipped and len(self._unread) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < end:
                return
            frame = bytes(self._unread[:end])
            del self._unread[:end]
            yield from self._read_frame(frame)

    def _read_frame(self, frame: bytes) -> Iterator[Message | bytes]:
        kind, flags, stream = frame[3], frame[4], int.from_bytes(frame[5:9], "big")
        if kind == _RESET or (kind in (0, 1) and flags & _END_STREAM):
            self.ended.add(stream)
        if kind != _DATA:
            yield frame
            return
        assert not flags & _PADDED, "gRPC pads nothing"
        part = self._parts.setdefault(stream, bytearray())
        part += frame[_HEAD_BYTES:]
        while len(part) >= 5 and len(part) >= (end := 5 + int.from_bytes(part[1:5], "big")):
            yield Message(stream, bytes(part[:end]))
            del part[:end]
        if flags & _END_STREAM:
            yield _frame(_DATA, flags, stream, b"")


class PacketProxy:
    """Forwards connections to `port`, and asks `faults` what goes wrong with each packet, if anything.

    "twice" writes a packet twice, "again-later" once more in front of the next but one of its stream, "delayed" holds
    up it and all behind it for `delay`, "swapped" puts it behind the next one of its stream if one comes meanwhile, and
    "cut" breaks all connections in its place.
    """

    def __init__(self, port: int, faults: Callable[[Packet], LinkFault | None] = lambda packet: None) -> None:
        self.faults = faults
        self.delay: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(DELAY_S)
        self.swap_s = DELAY_S
        """How long a packet that is swapped waits for the next one."""
        self.address = ""
        self._port = port
        self._writers = set[asyncio.StreamWriter]()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PacketProxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await wait_until(lambda: not self._writers)

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = {writer}
        self._writers |= writers
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
            writers.add(up_writer)
            self._writers |= writers
            pumps = _Pump(self, reader, up_writer, is_sent=True), _Pump(self, up_reader, writer, is_sent=False)
            await asyncio.gather(*(pump.run() for pump in pumps))
        except OSError:
            pass  # nobody is there: the client sees its connection break
        finally:
            for each in writers:
                each.transport.abort()
            self._writers -= writers


class _Pump:
    """One direction of one connection."""

    def __init__(
        self, proxy: PacketProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sent: bool
    ) -> None:
        self._proxy, self._reader, self._writer = proxy, reader, writer
        self._messages = Messages(is_sent=is_sent)
        self._late: list[Message | None] = []
        """To be written again in front of the next packets."""
        self._held: Message | None = None
        """To be written behind the next packet."""

    async def run(self) -> None:
        with suppress(ConnectionError):
            while data := await self._read():
                for piece in self._messages.read(data):
                    if isinstance(piece, bytes):
                        self._writer.write(piece)
                    elif (packet := piece.packet()) is None:
                        self._writer.write(piece.frames())
                    else:
                        await self._pass(piece, self._proxy.faults(packet))
                await self._writer.drain()
        self._writer.close()

    async def _read(self) -> bytes:
        while self._held is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._proxy.swap_s):
                    return await self._reader.read(1 << 16)
            self._write(self._held)
            self._held = None
        return await self._reader.read(1 << 16)

    def _write(self, message: Message | None) -> None:
        if message is not None and message.stream not in self._messages.ended:
            self._writer.write(message.frames())

    async def _pass(self, message: Message, fault: LinkFault | None) -> None:
        if any(late is not None and late.stream != message.stream for late in self._late):
            self._late.clear()
        self._write(self._late.pop(0) if self._late else None)
        if fault == "cut":
            self._proxy.cut()
            return
        if fault == "swapped" and self._held is None:
            self._held = message
            return
        if fault == "delayed":
            await self._writer.drain()
            await self._proxy.delay()
        if fault == "again-later":
            self._late[:] = [None, message]
        self._write(message.damaged() if fault == "corrupt" else message)
        self._write(message if fault == "twice" else None)
        self._write(self._held)
        self._held = None
