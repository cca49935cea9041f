"""Whether something can listen at an address, found out before it begins: gRPC says why not on stderr only."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from specsplit.core.errors import InvalidSettings
from specsplit.rpc.transport import format_address


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
                # Otherwise a socket for all IPv6 addresses would also collide with one for IPv4.
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
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
