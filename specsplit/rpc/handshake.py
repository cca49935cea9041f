"""Finds out why two processes come to no link: the connection, or the certificates of either side. Knows no calls.

grpc says of a handshake that failed only that it failed, so this one is made anew, with Python's own TLS.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from specsplit.core.errors import InvalidSettings
from specsplit.rpc.auth import LinkRole, server_name
from specsplit.rpc.certificate import NOT_YET_VALID, context_of
from specsplit.rpc.connectivity import why_unreachable
from specsplit.rpc.credentials import Security
from specsplit.rpc.transport import parse_address

_ALERT_S = 0.5
"""Time in which a server that refuses our certificate says so; one that takes it begins to speak."""
_EXPIRED, _OTHER_NAME = 10, 62
"""Verification results of OpenSSL; most others say that the chain does not end in our CA."""


async def why_refused(address: str, role: LinkRole, security: Security, timeout_s: float = 1.0) -> str | None:
    """Return in words why no link to the `role` at `address` comes about; None if one does.

    Raises:
        InvalidRequest: the address is malformed.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    reason = await why_unreachable(address, timeout_s)
    if reason is not None:
        return reason
    is_plain = security.certificates is None or address in security.plaintext_at
    # A server without TLS, or one that hangs, ends the other handshake in many ways, all of which say the same.
    with suppress(TimeoutError, OSError, EOFError, InvalidSettings):
        async with asyncio.timeout_at(end_s):
            if not is_plain:
                return await _refusal(address, role, security)
            return await _speaks_http(address) or await _asks_for_certificates(address)
    return None


async def _speaks_http(address: str) -> str | None:
    """Return what answers there if it is a server of HTTP/1; one of gRPC begins with a frame of HTTP/2."""
    reader, writer = await asyncio.open_connection(*parse_address(address))
    try:
        writer.write(b"HEAD / HTTP/1.0\r\n\r\n")
        is_http = await reader.read(7) == b"HTTP/1."
    except ConnectionError:
        return None
    finally:
        writer.transport.abort()
    return "HTTP answers there, as it does at a gateway" if is_http else None


async def _asks_for_certificates(address: str) -> str | None:
    """Return what a server says that we speak to in plaintext, if it is one with TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = parse_address(address)
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return None
    writer.transport.abort()
    return "it asks for a certificate, which the --tls options name"


async def _refusal(address: str, role: LinkRole, security: Security) -> str | None:
    assert security.certificates is not None, "the caller has looked"
    context = context_of(security.certificates.files, is_server=False)
    context.check_hostname = True
    context.set_alpn_protocols(["h2"])
    host, port = parse_address(address)
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=server_name(role))
    except ssl.SSLCertVerificationError as error:
        return _words(error, role)
    except (ssl.SSLError, ConnectionError):
        return "it speaks no TLS; start it with the --tls options, too"
    try:
        # In TLS 1.3 our side of the handshake is over before the server looks at our certificate.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ALERT_S):
                # A server of HTTP/2 speaks first.
                if not await reader.read(1):
                    return "it refuses our certificate"
    except (ssl.SSLError, ConnectionError) as error:
        said = (getattr(error, "reason", None) or "").rpartition("ALERT_")[2].replace("_", " ").lower()
        return f"it refuses our certificate ({said})" if said else "it refuses our certificate"
    finally:
        writer.transport.abort()
    return None


def _words(error: ssl.SSLCertVerificationError, role: LinkRole) -> str:
    if error.verify_code == _OTHER_NAME:
        return f"its certificate is not one of a {role}; is it another worker's address?"
    if error.verify_code in (NOT_YET_VALID, _EXPIRED):
        state = "has expired" if error.verify_code == _EXPIRED else "is not valid yet; do the clocks agree?"
        return f"its certificate {state}"
    return f"its certificate is not one of our CA ({error.verify_message})"
