"""Who calls, and what may be called by whom: identities from certificates, and the table of methods.

A certificate names its holder by the URI spiffe://specsplit/ROLE or spiffe://specsplit/ROLE/NAME.
Without certificates a caller is known by its host alone, and may call everything. Knows no files and no engines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import unquote

from specsplit.core.errors import AccessDenied
from specsplit.rpc.transport import is_loopback

LinkRole = Literal["draft", "target", "stage", "orchestrator", "gateway"]
ROLES: tuple[LinkRole, ...] = ("draft", "target", "stage", "orchestrator", "gateway")
TRUST_DOMAIN = "specsplit"
_URI = re.compile(rf"spiffe://{TRUST_DOMAIN}/({'|'.join(ROLES)})(?:/(?!\.{{1,2}}(?:/|$))[A-Za-z0-9._-]{{1,128}})*")

_CLIENTS: frozenset[LinkRole] = frozenset({"orchestrator", "gateway"})
_COORDINATOR: frozenset[LinkRole] = frozenset({"target"})
_ALL: frozenset[LinkRole] = frozenset(ROLES)
_DRAFT, _TARGET, _STAGE = (f"/specsplit.v1.{name}Service/" for name in ("Draft", "Target", "Stage"))
ALLOWED: Mapping[str, frozenset[LinkRole]] = {
    **{_DRAFT + name: _CLIENTS for name in ("GenerateDrafts", "Rounds", "EndSession", "Ping", "Stats")},
    **{_TARGET + name: _CLIENTS for name in ("VerifyDrafts", "Rounds", "VerifyStream", "Score", "GetTokenizer")},
    **{_TARGET + name: _CLIENTS for name in ("EndSession", "Ping", "Stats")},
    **{_STAGE + name: _COORDINATOR for name in ("Configure", "EndSession", "ExportKV", "ImportKV")},
    # Whoever watches a deployment looks at its stages as well.
    **{_STAGE + name: _COORDINATOR | _CLIENTS for name in ("Ping", "Stats")},
    # The coordinator's stream, or that of the stage before; the service tells them apart by their first message.
    _STAGE + "Forward": frozenset({"target", "stage"}),
    # Counters tell nothing of a text, and whoever watches has a certificate of any role.
    **{service + "Stats": _ALL for service in (_DRAFT, _TARGET, _STAGE)},
    **{"/grpc.health.v1.Health/" + name: _ALL for name in ("Check", "Watch", "List")},
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
}
"""The roles that may call each method; whatever has no entry is refused to everybody."""


def with_article(role: LinkRole) -> str:
    """Return the name of a role as a sentence has it."""
    return f"{'an' if role == 'orchestrator' else 'a'} {role}"


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The other end of a connection: what its certificate proves, or else the host that it calls from."""

    name: str
    """URI of the certificate, or the host as gRPC writes it, without the port."""
    role: LinkRole | None = None
    """None unless a certificate proves it."""

    @property
    def is_authenticated(self) -> bool:
        return self.role is not None

    @property
    def host(self) -> str:
        """Return the IP address that it calls from; empty if a certificate proves who it is, or nobody knows it."""
        # gRPC writes ipv4:10.0.0.1 and ipv6:%5B::1%5D, and callers over IPv4 at a server on [::] as mapped addresses.
        kind, _, host = ("", "", "") if self.is_authenticated else unquote(self.name).partition(":")
        return host.strip("[]").removeprefix("::ffff:") if kind in ("ipv4", "ipv6") else ""

    @property
    def may_name_callers(self) -> bool:
        """Whether to believe it whose a session is: it is on this machine, or a gateway or an orchestrator."""
        return self.role in _CLIENTS if self.is_authenticated else not self.host or is_loopback(self.host)


NOBODY = PeerIdentity("")
"""The identity outside of a call."""
_current: ContextVar[PeerIdentity] = ContextVar("specsplit_peer", default=NOBODY)


def current_peer() -> PeerIdentity:
    """Return who made the call, or opened the stream, that is being served here."""
    return _current.get()


def peer_identity(context: Any) -> PeerIdentity:
    """Return who made the call of a grpc servicer context; a certificate of no role counts as none."""
    proved = cast("Mapping[str, list[bytes]]", context.auth_context())
    identity = identity_of(name.decode("utf-8", "replace") for name in proved.get("peer_uri", ()))
    return identity or PeerIdentity(str(context.peer()).rpartition(":")[0])


def identity_of(uris: Any) -> PeerIdentity | None:
    """Return the identity that the URIs of a certificate name; None if they name none, or more than one."""
    found = [(uri, match) for uri in cast("list[str]", uris) if (match := _URI.fullmatch(uri))]
    if len(found) != 1:
        return None
    uri, match = found[0]
    return PeerIdentity(uri, cast(LinkRole, match[1]))


def server_name(role: LinkRole) -> str:
    """Return the DNS name that proves to clients that a certificate is one of `role`."""
    return f"{role}.{TRUST_DOMAIN}"


class Guard:
    """Decides about each call to one server; without certificates it only notes who calls."""

    def __init__(self, *, is_secure: bool) -> None:
        self._is_secure = is_secure

    def admit(self, context: Any, method: str) -> PeerIdentity:
        """Return the caller of `method`, which is the current peer from here to the end of the call.

        Raises:
            AccessDenied: its role may not call the method.
        """
        peer = peer_identity(context)
        if self._is_secure and peer.role not in ALLOWED.get(method, ()):
            what = method.lstrip("/").rpartition(".")[2].replace("/", ".")
            who = with_article(peer.role).capitalize() if peer.role else "A certificate without a role"
            raise AccessDenied(f"{who} may not call {what}.")
        # Each call is served by a task of its own, so that nothing has to be reset.
        _current.set(peer)
        return peer
