"""LMTP over a pair of pipes: one frame a line, one client for the length of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import sys
import threading
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
    output, has_left = sink or sys.stdout.buffer, asyncio.Event()

    def write(line: bytes) -> None:
        output.write(line)
        output.flush()

    async def send(frame: str) -> None:
        # On a thread: a client that does not read must not stop those parts of the process that talk to workers.
        try:
            await asyncio.to_thread(write, frame.encode() + b"\n")
        except BrokenPipeError:  # it reads nothing any more
            has_left.set()

    session = LmtpSession(server, send, name="stdio")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(session.close)
        stack.callback(await _connect(reader, source or sys.stdin.buffer))
        answering, leaving = asyncio.create_task(_answer(session, reader)), asyncio.create_task(has_left.wait())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        if not has_left.is_set():
            answering.result()


async def _answer(session: LmtpSession, reader: asyncio.StreamReader) -> None:
    while (line := await _next_line(reader)) != b"":
        if line is None:
            await session.refuse(f"A frame has at most {MAX_FRAME_BYTES} bytes.")
        elif text := line.decode(errors="replace").strip():
            await session.handle(text)
    await session.wait()


async def _connect(reader: asyncio.StreamReader, source: BinaryIO) -> Callable[[], None]:
    """Have what `source` holds, or will hold, come to the reader; return what ends that."""
    mode = os.fstat(source.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or source.isatty()):
        source = _through_pipe(source)
    # The transport closes what it is given, and stdin's number must not become that of some connection.
    own = os.fdopen(os.dup(source.fileno()), "rb")
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), own)
    return transport.close


def _through_pipe(source: BinaryIO) -> BinaryIO:
    """Return a pipe with the content of a file or device, of which an event loop cannot wait for anything."""
    there, here = os.pipe()

    def copy() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(here, "wb") as sink:
            shutil.copyfileobj(source, sink)

    threading.Thread(target=copy, name="specsplit-stdin", daemon=True).start()
    return os.fdopen(there, "rb")


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
            return None if is_too_long else line
        else:
            return None if is_too_long else line
