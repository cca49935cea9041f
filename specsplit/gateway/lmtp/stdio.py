"""LMTP over a pair of pipes: one frame a line, one client for the length of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from typing import BinaryIO

from specsplit.gateway.lmtp.session import LmtpSession
from specsplit.gateway.lmtp.websocket import MAX_FRAME_BYTES
from specsplit.gateway.models import ModelTable


async def serve_stdio(models: ModelTable, source: BinaryIO | None = None, sink: BinaryIO | None = None) -> None:
    """Answer the frames of `source` (stdin) on `sink` (stdout) until it ends, and the streams that are open then."""
    reader = asyncio.StreamReader(limit=MAX_FRAME_BYTES)
    await _connect(reader, source or sys.stdin.buffer)
    output = sink or sys.stdout.buffer

    def write(line: bytes) -> None:
        output.write(line)
        output.flush()

    async def send(frame: str) -> None:
        # On a thread: a client that does not read must not stop those parts of the process that talk to workers.
        with contextlib.suppress(BrokenPipeError):  # it has left, and reads nothing any more
            await asyncio.to_thread(write, frame.encode() + b"\n")

    session = LmtpSession(models, send)
    try:
        while line := await _next_line(reader):
            if line.strip():
                await session.handle(line.decode(errors="replace").strip())
        await session.wait()
    finally:
        await session.close()


async def _connect(reader: asyncio.StreamReader, source: BinaryIO) -> None:
    """Have what `source` holds, or will hold, come to the reader."""
    if stat.S_ISREG(os.fstat(source.fileno()).st_mode):  # of a file nothing can be waited for
        reader.feed_data(source.read())
        reader.feed_eof()
        return
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, nothing at the end; of a line that is too long its end, which is no frame."""
    while True:
        try:
            return await reader.readline()
        except ValueError:  # longer than the limit; what was read of it is gone
            continue
