"""Certificates for tests: those of `specsplit certs dev`, and ones that are wrong in one way each."""

from __future__ import annotations

import ipaddress
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from specsplit.core.sections import LinkSettings
from specsplit.rpc.auth import LinkRole
from specsplit.rpc.credentials import Security, open_security

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Paths:
    """The three files of one identity."""

    cert: Path
    key: Path
    ca: Path

    def settings(self) -> LinkSettings:
        return LinkSettings(tls_cert=str(self.cert), tls_key=str(self.key), tls_ca=str(self.ca))

    def security(self, role: LinkRole) -> Security:
        return open_security(self.settings(), role)

    def options(self) -> list[str]:
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)]

    def bytes(self) -> tuple[bytes, bytes, bytes]:
        """Return CA, key and certificate, in the order in which grpc takes them."""
        return self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()

    def replace_with(self, other: Paths) -> None:
        """Rotate: put the other files in the place of these."""
        for mine, new in ((self.ca, other.ca), (self.key, other.key), (self.cert, other.cert)):
            shutil.copyfile(new, mine)


class Authority:
    """A CA that signs whatever a test asks for, into files of a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._name, self._key = folder, name, ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, self._key, datetime.now(UTC) - 9 * _DAY, datetime.now(UTC) + 9 * _DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def role(self, role: LinkRole, name: str = "") -> Paths:
        """Return the files of a role as they should be; `name` tells several of a role apart."""
        uri = f"spiffe://specsplit/{role}" + (f"/{name}" if name else "")
        return self.sign(f"{role}{name}", [uri], [f"{role}.specsplit", "localhost"])

    def sign(
        self, file: str, uris: Sequence[str], names: Sequence[str], begins: timedelta = -_DAY, ends: timedelta = _DAY
    ) -> Paths:
        """Return the files of a certificate with these names, valid from and until so long after now."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        builder = _builder(file, self._name, key, now + begins, now + ends)
        found: list[x509.GeneralName] = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, names)]
        found.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        certificate = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
        paths = Paths(self._folder / f"{file}.pem", self._folder / f"{file}.key", self.ca)
        paths.cert.write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        paths.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return paths


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )
