"""Sockets that listen, and whether one can, found out before it begins: gRPC says why not on stderr only."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from specsplit.core.errors import InvalidSettings
from specsplit.rpc.transport import format_address, is_wildcard

_BACKLOG = 1024


async def check_free(host: str, port: int) -> None:
    """Raise if nothing can listen at the address.

    Raises:
        InvalidSettings: it is in use, or no address of this machine.
    """
    address = format_address(host, port)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidSettings(f"The host of {address} has no address here; listen at 0.0.0.0 or 127.0.0.1.") from error
    # A name may have several addresses, of both IP versions. One in use is an error; one that this machine cannot
    # bind is passed over if another works, as gRPC does.
    failures: list[OSError] = []
    for family, kind, protocol, _, bind_to in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # `::` listens for IPv4 as well: there, and there alone, a socket for IPv4 is in the way.
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_wildcard(host))
                trial.bind(bind_to)
                trial.listen(1)
        except OSError as failure:
            failures.append(failure)
    in_use = next((failure for failure in failures if failure.errno == errno.EADDRINUSE), None)
    if in_use is not None:
        raise InvalidSettings(f"{address} is in use; stop what listens there, or choose another port (0 picks one).")
    if len(failures) == len(found):
        reason = os.strerror(failures[0].errno or errno.EADDRNOTAVAIL).lower()
        raise InvalidSettings(f"Nothing can listen at {address} ({reason}); choose an address of this machine.")


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host of IPv4, or at an address of IPv6; `::` takes connections of both.

    Raises:
        OSError: nothing can listen there.
    """
    is_ipv6 = ":" in host
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=_BACKLOG,
        # As gRPC does, so that `[::]` means the same for every port.
        dualstack_ipv6=is_ipv6 and is_wildcard(host) and socket.has_dualstack_ipv6(),
    )
