"""A port that answers GET /metrics in plaintext and to everybody. Knows a function that makes the page, and no counter.

A scraper asks every few seconds, so there are few connections, each for one answer and for a short time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

from specsplit.limits import MAX_SCRAPE_BYTES, MAX_SCRAPES, SCRAPE_S
from specsplit.rpc.listening import check_free, listener_at
from specsplit.rpc.transport import format_address, parse_address

PATH = "/metrics"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@asynccontextmanager
async def metrics_port(listen: str, page: Callable[[], bytes]) -> AsyncGenerator[str]:
    """Answer scrapes at `listen` with what `page` returns, for the length of the block; yield the address.

    Raises:
        InvalidRequest: `listen` is malformed.
        InvalidSettings: nothing can listen there; the message says why.
    """
    host, port = parse_address(listen, listening=True)
    await check_free(host, port)
    connections: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= MAX_SCRAPES:
            writer.transport.abort()
            return
        task = asyncio.create_task(_answer(reader, writer, page), name="specsplit-metrics")
        connections.add(task)
        task.add_done_callback(connections.discard)

    # A name may have several addresses, which asyncio looks up; it would leave IPv4 out at `::`.
    if ":" in host:
        server = await asyncio.start_server(begin, sock=listener_at(host, port), limit=MAX_SCRAPE_BYTES)
    else:
        server = await asyncio.start_server(begin, host, port, limit=MAX_SCRAPE_BYTES)
    try:
        yield format_address(host, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, page: Callable[[], bytes]) -> None:
    try:
        # A client that hangs up, sends nonsense or reads nothing is nobody's business.
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(SCRAPE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head.split(b"\r\n", 1)[0].split(b" "), page))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
    finally:
        writer.transport.abort()


def _response(request_line: list[bytes], page: Callable[[], bytes]) -> bytes:
    """Return the whole response to a request line, which is method, target and version."""
    method, target = (request_line[0], request_line[1]) if len(request_line) == 3 else (b"", b"")
    if target.partition(b"?")[0] != PATH.encode():
        status, body = "404 Not Found", f"There is only {PATH} here.\n".encode()
    elif method != b"GET":
        status, body = "405 Method Not Allowed", f"{PATH} is for GET.\n".encode()
    else:
        status, body = "200 OK", page()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
