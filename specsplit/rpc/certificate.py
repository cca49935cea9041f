"""Reads a process's certificate, key and CA bundle, and proves that the three work together. Knows no grpc.

The proof is a handshake of the certificate with itself, in memory: it fails for whatever a peer would refuse, and its
result says what the certificate holds, with nothing but the standard library.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from specsplit.core.errors import InvalidSettings
from specsplit.rpc.auth import LinkRole, PeerIdentity, identity_of, server_name

NOT_YET_VALID = 9
"""Verification result of OpenSSL for a certificate that is valid from later on."""
_MAX_FLIGHTS = 10
"""Messages that a handshake sends to and fro at most."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of the three files, all PEM."""

    cert: Path
    key: Path
    ca: Path

    @property
    def all(self) -> tuple[Path, Path, Path]:
        return self.cert, self.key, self.ca

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes with the files; raises OSError."""
        return tuple((found.st_mtime_ns, found.st_ino, found.st_size) for found in (path.stat() for path in self.all))


@dataclass(frozen=True, slots=True)
class Certificate:
    """One consistent content of the files, and what the certificate says."""

    cert: bytes
    key: bytes
    ca: bytes
    identity: PeerIdentity | None
    """None if it names no role."""
    dns_names: tuple[str, ...]
    addresses: tuple[str, ...]
    ends: datetime
    """When it expires."""

    def proves(self, role: LinkRole) -> bool:
        """Return whether peers take its holder for one of `role`, as client and as server."""
        return self.identity is not None and self.identity.role == role and server_name(role) in self.dns_names


def read_certificate(files: CertificateFiles) -> Certificate:
    """Read the files.

    Raises:
        InvalidSettings: one is missing or malformed, they do not belong together, or the certificate is not valid now.
    """
    cert, key, ca = (_bytes(path) for path in files.all)
    found = _self_handshake(files)
    names = cast("tuple[tuple[str, str], ...]", found.get("subjectAltName", ()))

    def of(kind: str) -> tuple[str, ...]:
        return tuple(name for of_kind, name in names if of_kind == kind)

    # The handshake has read the files anew; other content since then would not have been proved.
    if (cert, key, ca) != tuple(_bytes(path) for path in files.all):
        raise InvalidSettings(f"The certificate {files.cert} is just being replaced; try again in a moment.")
    ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(found["notAfter"])), UTC)
    return Certificate(cert, key, ca, identity_of(of("URI")), of("DNS"), of("IP Address"), ends)


def context_of(files: CertificateFiles, *, is_server: bool) -> ssl.SSLContext:
    """Return a context that shows the certificate and asks for one of the same CA, whatever host it names.

    Raises:
        InvalidSettings: a file is missing or malformed, or the key is not the certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidSettings(f"The key {files.key} is not that of the certificate {files.cert}.") from error
        raise InvalidSettings(
            f"{files.cert} and {files.key} are no certificate and key in PEM, the key without a password."
        ) from error
    except OSError as error:
        raise InvalidSettings(f"{files.cert} or {files.key} cannot be read ({error.strerror}).") from error
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise InvalidSettings(f"{files.ca} holds no certificates of a CA in PEM.") from error
    return context


def _self_handshake(files: CertificateFiles) -> dict[str, Any]:
    """Return what the certificate says once it has proved itself to itself, as server and as client."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context_of(files, is_server=True).wrap_bio(to_server, to_client, server_side=True)
    client = context_of(files, is_server=False).wrap_bio(to_client, to_server)
    waiting = [client, server]
    try:
        for _ in range(_MAX_FLIGHTS):
            for end in list(waiting):
                try:
                    end.do_handshake()
                    waiting.remove(end)
                except ssl.SSLWantReadError:
                    continue
            if not waiting:
                return cast("dict[str, Any]", client.getpeercert())
    except ssl.SSLCertVerificationError as error:
        hint = " (is the clock of this machine right?)" if error.verify_code == NOT_YET_VALID else ""
        raise InvalidSettings(
            f"The certificate {files.cert} does not pass the check by {files.ca}: {error.verify_message}{hint}."
        ) from error
    except ssl.SSLError as error:
        raise InvalidSettings(f"The certificate {files.cert} cannot be used ({error.reason}).") from error
    raise InvalidSettings(f"The certificate {files.cert} comes to no handshake.")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidSettings(f"{path} cannot be read ({error.strerror}); check the --tls options.") from error


def _no_password() -> str:
    # Without this OpenSSL would ask at the terminal.
    return ""
