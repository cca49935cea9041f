"""Finds out why an address cannot be reached: resolves it, connects, hangs up. Knows neither gRPC nor workers."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import threading

from specsplit.rpc.transport import parse_address

_LOOK_S = 1.0


async def why_unreachable(address: str, timeout_s: float = _LOOK_S) -> str | None:
    """Return in words why no connection to `address`, HOST:PORT, can be made; None if one can.

    Raises:
        InvalidRequest: the address is malformed.
    """
    host, port = parse_address(address)
    reason = f"the name {host} does not resolve in time"
    try:
        async with asyncio.timeout(timeout_s):
            try:
                addresses = await _resolved(host, port)
            except OSError:
                return f"the name {host} does not resolve"
            reason = "it does not answer"
            for found in addresses:
                try:
                    _, writer = await asyncio.open_connection(found, port)
                except OSError as failure:
                    reason = _words(failure)
                else:
                    writer.close()
                    return None
    except TimeoutError:
        pass
    return reason


def _words(failure: OSError) -> str:
    if failure.errno == errno.ECONNREFUSED:
        return "the connection is refused"
    return os.strerror(failure.errno).lower() if failure.errno else "no connection comes about"


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _resolved(host: str, port: int) -> list[str]:
    """Return the IP addresses of `host`.

    Raises:
        OSError: it has none.
    """
    if _is_ip_address(host):
        return [host]
    # A resolver may take minutes and cannot be cancelled. A daemon thread of ours is waited for by nobody; the loop's
    # executor would hold up the end of the process.
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def settle(found: list[str] | OSError) -> None:
        if answer.done():
            return
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def resolve() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found: list[str] | OSError = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except OSError as failure:
            found = failure
        # A label of more than 63 characters.
        except UnicodeError as failure:
            found = OSError(str(failure))
        try:
            loop.call_soon_threadsafe(settle, found)
        except RuntimeError:
            # The loop is closed, so nobody waits for the answer any more.
            return

    threading.Thread(target=resolve, name="specsplit-resolve", daemon=True).start()
    return await answer
