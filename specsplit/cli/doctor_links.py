"""The doctor's checks of what links need: certificates, who may read keys, ports. Knows no workers."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from specsplit.cli import ports
from specsplit.cli.doctor_checks import Check
from specsplit.core.errors import SpecSplitError
from specsplit.core.paths import expanded
from specsplit.core.sections import GatewaySettings, LinkSettings, StageSettings, WorkerSettings
from specsplit.core.settings import EffectiveSettings
from specsplit.engine import event_loop
from specsplit.gateway.keys import required_keys
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
        if isinstance(section, WorkerSettings | StageSettings):
            yield from _plaintext(role, section)
    yield from _api_keys(effective.settings.gateway)
    yield from _private("API keys", effective.settings.gateway.api_key_file)
    yield from _distinct_ports(effective)
    yield from _free_ports(effective)


def _api_keys(settings: GatewaySettings) -> Iterator[Check]:
    """Check that a gateway has the keys that it needs and can read their file, and that it lets somebody in."""
    try:
        keys = required_keys(settings)
    except SpecSplitError as error:
        yield Check("API keys", False, str(error))
        return
    if keys is not None:
        nobody = "none, so nobody is let in: add the line of specsplit keys new NAME"
        detail = f"{len(keys)} in {settings.api_key_file}" if len(keys) else nobody
        yield Check("API keys", True, detail, is_warning=not len(keys))


def _plaintext(role: LinkRole, settings: WorkerSettings | StageSettings) -> Iterator[Check]:
    """Check that the role would serve with its links as they are; certificates that are wrong have their own check."""
    try:
        security = open_security(settings, role)
    except SpecSplitError:
        return
    try:
        ports.check_links(settings, security)
    except SpecSplitError as error:
        yield Check(f"{role} links", False, str(error))


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


def _distinct_ports(effective: EffectiveSettings) -> Iterator[Check]:
    """Check that the ports of each role are different ones."""
    for role, section in effective.settings.model_dump().items():
        try:
            ports.check_distinct({field: section[field] for field in _PORTS if field in section})
        except SpecSplitError as error:
            yield Check(f"{role} ports", False, str(error))


def _free_ports(effective: EffectiveSettings) -> Iterator[Check]:
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
