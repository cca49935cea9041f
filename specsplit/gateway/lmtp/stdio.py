"""LMTP over a pair of pipes: one frame a line, one client for the length of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from collections.abc import Callable
from typing import BinaryIO

from specsplit.gateway.lmtp import messages
from specsplit.gateway.lmtp.session import LmtpServer, LmtpSession
from specsplit.limits import MAX_FRAME_BYTES


def write_status(status: messages.Status, sink: BinaryIO | None = None, **details: object) -> None:
    """Tell the client about the process, before or after its models are loaded."""
    output = sink or sys.stdout.buffer
    output.write(messages.frame("SYS", [{"status": status, **details}]).encode() + b"\n")
    output.flush()


async def serve_stdio(server: LmtpServer, source: BinaryIO | None = None, sink: BinaryIO | None = None) -> None:
    """Answer the frames of `source` (stdin) on `sink` (stdout) until it ends, and the streams that are open then."""
    reader = asyncio.StreamReader(limit=MAX_FRAME_BYTES)
    output = sink or sys.stdout.buffer

    def write(line: bytes) -> None:
        output.write(line)
        output.flush()

    async def send(frame: str) -> None:
        # On a thread: a client that does not read must not stop those parts of the process that talk to workers.
        with contextlib.suppress(BrokenPipeError):  # it has left, and reads nothing any more
            await asyncio.to_thread(write, frame.encode() + b"\n")

    session = LmtpSession(server, send, name="stdio")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(session.close)
        stack.callback(await _connect(reader, source or sys.stdin.buffer))
        while (line := await _next_line(reader)) != b"":
            if line is None:
                await session.refuse(f"A frame has at most {MAX_FRAME_BYTES} bytes.")
            elif text := line.decode(errors="replace").strip():
                await session.handle(text)
        await session.wait()


async def _connect(reader: asyncio.StreamReader, source: BinaryIO) -> Callable[[], None]:
    """Have what `source` holds, or will hold, come to the reader; return what ends that."""
    if stat.S_ISREG(os.fstat(source.fileno()).st_mode):  # of a file nothing can be waited for
        reader.feed_data(source.read())
        reader.feed_eof()
        return lambda: None
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    return transport.close


async def _next_line(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next line, nothing at the end, and None for a line that is too long, which is dropped."""
    is_too_long = False
    while True:
        try:
            line = await reader.readuntil()
        except asyncio.LimitOverrunError as error:
            is_too_long = True
            await reader.readexactly(error.consumed)
        except asyncio.IncompleteReadError as error:  # the end, perhaps without a newline
            line = error.partial
            return None if is_too_long and line else line
        else:
            return None if is_too_long else line
