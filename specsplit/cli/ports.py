"""Checks of the addresses of a service, before a model is loaded for it, and the doctor's. Imports no grpc."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from specsplit.core.errors import InvalidSettings
from specsplit.core.sections import StageSettings, TargetSettings, WorkerSettings
from specsplit.engine import event_loop
from specsplit.rpc.listening import check_free
from specsplit.rpc.transport import is_wildcard, parse_address

if TYPE_CHECKING:
    from specsplit.rpc.credentials import Security


def check_links(settings: WorkerSettings | StageSettings, security: Security) -> None:
    """Check that links without certificates stay on this machine: those to the service, and a target's to its stages.

    Raises:
        InvalidSettings: one would leave it, and nobody said that it may.
    """
    security.check_listen(settings.listen)
    for address in (*settings.stages, *settings.spares) if isinstance(settings, TargetSettings) else ():
        security.check_dial(address)


def check_ports(**addresses: str | None) -> None:
    """Check that something can listen at each of the addresses, named by their options.

    Raises:
        InvalidSettings: an address is none, is in use, or collides with that of another option.
    """
    check_distinct(addresses)
    for listen in filter(None, addresses.values()):
        event_loop.run(check_free(*parse_address(listen, listening=True)))


def check_distinct(addresses: Mapping[str, str | None]) -> None:
    """Check that no two options name one port of one host, or of one host and of all.

    Raises:
        InvalidSettings: two of them do; InvalidRequest: an address is none.
    """
    named = [(option, listen, *parse_address(listen, listening=True)) for option, listen in addresses.items() if listen]
    for (first, one, host, port), (second, other, other_host, other_port) in combinations(named, 2):
        # Port 0 is another free one each time.
        if port != other_port or port == 0:
            continue
        if host == other_host:
            raise InvalidSettings(f"--{first} and --{second} name the same address {one}; change one of them.")
        if is_wildcard(host) or is_wildcard(other_host):
            raise InvalidSettings(
                f"--{first} {one} and --{second} {other} collide, since one is every address of this machine; "
                "change a port."
            )
