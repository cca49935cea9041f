"""The doctor's checks of what links need: certificates, who may read keys, ports. Knows no workers."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from specsplit.cli.doctor_checks import Check
from specsplit.core.errors import SpecSplitError
from specsplit.core.paths import expanded
from specsplit.core.sections import LinkSettings
from specsplit.core.settings import EffectiveSettings
from specsplit.engine import event_loop
from specsplit.gateway.keys import KeyFile
from specsplit.rpc.auth import ROLES, LinkRole
from specsplit.rpc.certificate import Certificate
from specsplit.rpc.credentials import open_security
from specsplit.rpc.listening import check_free
from specsplit.rpc.transport import parse_address

_SOON = timedelta(days=7)
_PORTS = ("listen", "health", "metrics", "http", "lmtp")


CERTIFICATE = "certificate"
"""Name of the check of the certificate of the process that runs the doctor; those of others have their role before."""


def check_links(effective: EffectiveSettings) -> Iterator[Check]:
    """Check the certificates of every role that the settings give some, the files of keys, and ports of services."""
    for role in ROLES:
        section: LinkSettings = getattr(effective.settings, role)
        if any((section.tls_cert, section.tls_key, section.tls_ca)):
            yield from _certificate(role, section)
        elif section.insecure:
            detail = "links may leave this machine without certificates: others can read and change what they carry"
            yield Check(f"{role} links", True, detail, is_warning=True)
    keys_file = effective.settings.gateway.api_key_file
    yield from _api_keys(keys_file)
    yield from _private("API keys", keys_file)
    yield from _ports(effective)


def _api_keys(path: str | None) -> Iterator[Check]:
    """Check that a gateway can read its file of keys, and that it lets somebody in."""
    if path is None:
        return
    try:
        count = len(KeyFile(Path(path)))
    except SpecSplitError as error:
        yield Check("API keys", False, str(error))
        return
    nobody = "none, so nobody is let in: add the line of specsplit keys new NAME"
    yield Check("API keys", True, f"{count} in {path}" if count else nobody, is_warning=not count)


def _certificate(role: LinkRole, settings: LinkSettings) -> Iterator[Check]:
    name = CERTIFICATE if role == "orchestrator" else f"{role} {CERTIFICATE}"
    try:
        found = open_security(settings, role).certificates
    except SpecSplitError as error:
        yield Check(name, False, str(error))
    else:
        if found is not None:
            yield _described(name, found.current)
    yield from _private("key" if role == "orchestrator" else f"{role} key", settings.tls_key)


def _described(name: str, certificate: Certificate) -> Check:
    assert certificate.identity is not None, "a certificate without a role is refused"
    left, names = certificate.ends - datetime.now(UTC), ", ".join((*certificate.dns_names, *certificate.addresses))
    detail = f"{certificate.identity.name}, for {names}, ends {certificate.ends:%Y-%m-%d %H:%M} UTC"
    if left < _SOON:
        detail += "; replace the files in time, and the process takes the new ones by itself"
    return Check(name, True, detail, is_warning=left < _SOON)


def _private(name: str, path: str | None) -> Iterator[Check]:
    """Check that only the owner and its group may read a file, as Kubernetes mounts a Secret with an fsGroup."""
    try:
        mode = expanded(path).stat().st_mode if path else None
    except OSError:
        return  # whoever reads it says so
    if mode is not None and mode & (stat.S_IROTH | stat.S_IWOTH):
        yield Check(f"{name} file", True, f"{path} is open to every user here: chmod o-rw {path}", is_warning=True)


def _ports(effective: EffectiveSettings) -> Iterator[Check]:
    for key, value, _ in effective.rows():
        role, field = key.split(".")
        if field not in _PORTS or key not in effective.origins or not value:
            continue
        try:
            event_loop.run(check_free(*parse_address(value, listening=True)))
        except SpecSplitError as error:
            yield Check(f"{role} {field}", True, f"{error}", is_warning=True)
        else:
            yield Check(f"{role} {field}", True, f"{value} is free")
