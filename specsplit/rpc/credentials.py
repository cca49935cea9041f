"""How a process's links are secured: mutual TLS, or plaintext on loopback; the one place that makes ports and channels.

Certificates are read again when their files change: a server shows the new one to every new connection, and a client
dials anew for its next call, while streams under way stay where they are (rounds: until the identity is another one).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from specsplit.core.errors import InvalidSettings
from specsplit.core.paths import expanded
from specsplit.core.sections import LinkSettings
from specsplit.rpc.auth import Guard, LinkRole, server_name, with_article
from specsplit.rpc.certificate import Certificate, CertificateFiles, read_certificate
from specsplit.rpc.transport import client_options, dial_target, is_loopback, parse_address

LOOK_S = 1.0
"""Period at which a client looks at the files; a server looks with every connection."""
_REMEDY = (
    "name --tls-cert, --tls-key and --tls-ca (specsplit certs dev DIR makes some for a trial), or accept it with "
    "--insecure"
)
_log = logging.getLogger(__name__)


class Certificates:
    """The certificate of this process in its `role`, followed through rotations; used by several threads."""

    def __init__(self, files: CertificateFiles, role: LinkRole | None) -> None:
        """Read the files; without a `role` it is the one that they prove.

        Raises:
            InvalidSettings: they cannot be used, or are of another role.
        """
        self.files = files
        self.role: LinkRole | None = role
        self._lock = threading.Lock()
        self._stamp: object = _stamp(files)
        """The stamp of the files in use."""
        self._failure: tuple[object, str] | None = None
        """Stamp and error of the files that could last not be used, which are logged once."""
        self._current = self._read()
        self._version = 1
        self._looked_s = time.monotonic()

    @property
    def current(self) -> Certificate:
        """Return the certificate in use."""
        return self._current

    @property
    def version(self) -> int:
        """Return a number that rises with every rotation."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self.look()
        return self._version

    def look(self) -> None:
        """Read the files if they have changed; what cannot be used changes nothing, and is tried again."""
        with self._lock:
            self._looked_s = time.monotonic()
            # The stamp is taken first: a change while the files are read shows at the next look.
            stamp = _stamp(self.files)
            if stamp == self._stamp:
                return
            try:
                self._current = self._read()
            except InvalidSettings as error:
                # The same files may become usable later: a certificate whose time begins, a key with other permissions.
                if (stamp, str(error)) != self._failure:
                    _log.warning("the certificate before stays in use: %s", error)
                self._failure = stamp, str(error)
                return
            self._stamp, self._failure = stamp, None
            self._version += 1
            _log.info("the certificate was rotated; the new one ends at %s", self._current.ends)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a client with the certificate in use."""
        # A thread of gRPC may replace it meanwhile, and key and certificate have to be of one.
        current = self._current
        return grpc.ssl_channel_credentials(current.ca, current.key, current.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a server, which follow rotations and ask every client for a certificate."""
        shown = self._version

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            self.look()
            if shown == self._version:
                return None
            shown = self._version
            return self._configuration()

        make: Callable[..., grpc.ServerCredentials] = grpc.dynamic_ssl_server_credentials
        return make(self._configuration(), fetch, require_client_authentication=True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        current = self._current
        return grpc.ssl_server_certificate_configuration([(current.key, current.cert)], current.ca)

    def _read(self) -> Certificate:
        found = read_certificate(self.files)
        proved = found.identity.role if found.identity else None
        role: LinkRole = self.role or proved or "orchestrator"
        if not found.proves(role):
            whose = f"one of {with_article(proved)}" if proved else "of no role"
            raise InvalidSettings(
                f"The certificate {self.files.cert} is {whose}; {with_article(role)} needs the URI "
                f"spiffe://specsplit/{role} and the name {server_name(role)} in it."
            )
        return found


@dataclass(frozen=True, slots=True)
class Security:
    """How the links of a process are secured; without certificates they stay on loopback, unless `is_insecure`."""

    certificates: Certificates | None = None
    is_insecure: bool = False
    plaintext_at: frozenset[str] = frozenset()
    """Addresses of processes that this one has started on loopback, which have no certificates."""

    @property
    def guard(self) -> Guard:
        """Return what decides about the calls to a server."""
        return Guard(is_secure=self.certificates is not None)

    def check_listen(self, address: str) -> None:
        """Raise InvalidSettings if other machines could reach a port without certificates at `address`."""
        host, _ = parse_address(address, listening=True)
        if self.certificates is None and not self.is_insecure and not is_loopback(host):
            raise InvalidSettings(
                f"{address} can be reached from other machines, and without certificates anybody there may read and "
                f"use it: {_REMEDY}."
            )

    def version(self, address: str) -> int:
        """Return a number that rises when a channel to `address` should be made anew."""
        return 0 if self.certificates is None or address in self.plaintext_at else self.certificates.version

    def identity(self, address: str) -> str:
        """Return the identity that a channel to `address` shows from now on; empty without certificates."""
        if self.certificates is None or address in self.plaintext_at:
            return ""
        identity = self.certificates.current.identity
        assert identity is not None, "a certificate without a role is refused"
        return identity.name

    def check_dial(self, address: str) -> None:
        """Raise InvalidSettings if a link to `address` would leave this machine in plaintext."""
        host, _ = parse_address(address)
        if self.certificates is None and not self.is_insecure and not is_loopback(host):
            raise InvalidSettings(
                f"The link to {address} leaves this machine, and without certificates others may read and change "
                f"it: {_REMEDY}."
            )

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Let a server listen at `address`, and return the port; raises RuntimeError if nothing can listen there."""
        if self.certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self.certificates.server_credentials())

    def open_channel(self, address: str, role: LinkRole, message_bytes: int = 0) -> grpc.aio.Channel:
        """Return a channel to `address`, over which nothing is sent unless a `role` answers there.

        `message_bytes` are those of a large message, if it is for one.
        """
        options = client_options(message_bytes)
        if self.certificates is None or address in self.plaintext_at:
            return grpc.aio.insecure_channel(dial_target(address), options=options)
        # grpc's Python compares one name of the server's certificate, in the handshake, and gives no access to others
        # (docs/adr/0023): here it is the role's name, whatever the address.
        named = [*options, ("grpc.ssl_target_name_override", server_name(role))]
        return grpc.aio.secure_channel(dial_target(address), self.certificates.channel_credentials(), options=named)


ON_LOOPBACK = Security()
"""Plaintext that does not leave this machine: for tests, for processes started here, and for whoever names nothing."""


def open_security(settings: LinkSettings, role: LinkRole | None) -> Security:
    """Return the security that the settings of `role` ask for; None takes the certificate of any role.

    Raises:
        InvalidSettings: the certificate is incomplete, wrong or of another role; or --insecure stands beside it.
    """
    named = [settings.tls_cert, settings.tls_key, settings.tls_ca]
    paths = [expanded(name) for name in named if name is not None]
    if not paths:
        return Security(is_insecure=settings.insecure)
    if len(paths) < len(named):
        raise InvalidSettings("Name all of --tls-cert, --tls-key and --tls-ca, or none of them.")
    if settings.insecure:
        raise InvalidSettings(
            "Links are insecure or have certificates: leave out insecure (--insecure), or tls_cert, tls_key and tls_ca."
        )
    return Security(Certificates(CertificateFiles(*paths), role))


def says_how(settings: LinkSettings) -> bool:
    """Return whether anything is said of how links are secured."""
    return settings.insecure or any((settings.tls_cert, settings.tls_key, settings.tls_ca))


def _stamp(files: CertificateFiles) -> object:
    try:
        return files.stamp()
    except OSError as error:
        return str(error)
