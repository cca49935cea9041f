"""The names by which a gateway on loopback may be asked, so that no page of another site can take itself for it.

Such a page has its own name resolved to 127.0.0.1 (DNS rebinding). The browser then takes the gateway for that site,
and lets the page ask it anything and read the answers. Only the Host header, which no page chooses, still has the name.
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from specsplit.gateway.errors import ApiError
from specsplit.rpc.transport import is_loopback

_LISTENER = "specsplit.listener"
"""The key of a scope for the host at which its server listens."""


def listening_at(host: str, app: ASGIApp) -> ASGIApp:
    """Return `app`, whose requests know that the server listens at `host`."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_LISTENER] = host
        await app(scope, receive, send)

    return called


def foreign_host(scope: Scope) -> ApiError | None:
    """Return the refusal of a request to a listener on loopback under a name that is not this machine's, or None.

    Addresses are nobody's name. Whoever sends no Host header is no browser.
    """
    if not is_loopback(scope.get(_LISTENER, "")):
        return None
    header = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    name = _without_port(header)
    if not name or name == "localhost" or name.endswith(".localhost") or _is_address(name):
        return None
    return ApiError(
        403,
        f"This gateway needs no key and listens on loopback only, so it is not asked as {name[:100]}: "
        "ask localhost or 127.0.0.1, or start it with --api-key-file.",
        code="host_not_allowed",
    )


def _without_port(header: str) -> str:
    header = header.strip().lower()
    name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
    return name.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
