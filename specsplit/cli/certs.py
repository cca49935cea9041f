"""`specsplit certs dev`: a throw-away CA and a certificate for every role, to try links with mutual TLS.

The CA's key is never written, so that nothing more can be signed with it.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsplit.cli.help import Group, ShortCommand
from specsplit.core.errors import InvalidSettings, MissingExtra, ResourceError
from specsplit.core.paths import expanded

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_CA_NAME = "SpecSplit, for development"
_EARLY = timedelta(minutes=5)
"""Certificates are valid from a little before now, since clocks of several machines differ."""
app = typer.Typer(cls=Group, help="Certificates of the links between processes.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Make certificates for --tls-cert, --tls-key and --tls-ca."""


@app.command("dev", cls=ShortCommand)
def dev(
    folder: Annotated[str, typer.Argument(help="Folder to write; it is made, or empty.", metavar="DIR")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address to add to localhost; may be repeated.", metavar="NAME"),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=825, help="Days until they expire.", metavar="N")] = 30,
) -> None:
    """Write ca.pem, and ROLE.pem and ROLE.key for draft, target, stage, orchestrator and gateway."""
    path = expanded(folder)
    _prepare(path)
    write_certificates(path, host or (), timedelta(days=days))
    typer.echo(f"{path} holds a CA and certificates for {days} days: give each process its own, such as", err=True)
    names = " ".join(f"--tls-{part} {path / name}" for part, name in _files_of("target"))
    typer.echo(f"specsplit target {names}")


def _files_of(role: str) -> tuple[tuple[str, str], ...]:
    return ("cert", f"{role}.pem"), ("key", f"{role}.key"), ("ca", "ca.pem")


def _prepare(path: Path) -> None:
    """Make the folder; refuse one that holds anything.

    Raises:
        InvalidSettings: it is a file, or not empty.
        ResourceError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_empty = not any(path.iterdir())
    except FileExistsError as error:
        raise InvalidSettings(f"{path} is a file; name a folder that does not exist, or is empty.") from error
    except OSError as error:
        raise ResourceError(f"{path} cannot be made ({error.strerror}); name another folder.") from error
    if not is_empty:
        raise InvalidSettings(f"{path} is not empty; name a folder that does not exist, or is empty.")


def write_certificates(path: Path, hosts: Any, lasting: timedelta) -> None:
    """Write a new CA and the files of every role into a folder; all of them are for their owner alone.

    Raises:
        MissingExtra: the package `cryptography` is not installed.
        InvalidSettings: a host is no name and no address.
        ResourceError: a file cannot be written.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "Making certificates needs the package cryptography: install it with pip install 'specsplit[certs]'."
        ) from error
    from specsplit.rpc.auth import ROLES

    ends = datetime.now(UTC) + lasting
    ca_key = ec.generate_private_key(ec.SECP256R1())
    _write(path / "ca.pem", _pem(_ca(ca_key, ends)))
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        _write(path / f"{role}.pem", _pem(_leaf(role, key, ca_key, hosts, ends)))
        _write(path / f"{role}.key", _key_pem(key))


def _ca(key: EllipticCurvePrivateKey, ends: datetime) -> x509.Certificate:
    from cryptography import x509

    builder = _builder(_CA_NAME, key.public_key(), ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return _signed(builder.add_extension(_ca_usage(), critical=True), key)


def _ca_usage() -> x509.KeyUsage:
    from cryptography import x509

    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused)


def _leaf(
    role: str, key: EllipticCurvePrivateKey, ca_key: EllipticCurvePrivateKey, hosts: Any, ends: datetime
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(f"spiffe://specsplit/{role}"),
        *(_general_name(host) for host in (f"{role}.specsplit", "localhost", "127.0.0.1", "::1", *hosts)),
    ]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(role, key.public_key(), ends)
    builder = builder.add_extension(x509.SubjectAlternativeName(dict.fromkeys(names)), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return _signed(builder, ca_key)


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host.isascii() or not host.replace("-", "").replace(".", "").replace("*", "").isalnum():
        raise InvalidSettings(f"--host {host!r} is no name and no address; write it without port.")
    return x509.DNSName(host)


def _builder(name: str, key: Any, ends: datetime) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(_CA_NAME))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _EARLY)
        .not_valid_after(ends)
    )


def _signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    # Python 3.13 and later refuse a chain without the identifiers of its keys.
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    return builder.add_extension(issuer, critical=False).sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written ({error.strerror}).") from error
