"""A coordinator's claim to a stage, and the addresses that a stage dials for one. Knows no streams.

Whoever reaches a stage's port may ask it for anything. So a stage that is in use obeys only who has shown the same as
the coordinator that has it, and it dials only addresses that its own operator has named, or that are as near as the
caller itself: else it would look around in its network for strangers.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from specsplit.core.errors import InvalidRequest
from specsplit.rpc.auth import PeerIdentity, identity_of
from specsplit.rpc.transport import format_address, is_loopback, parse_address


@dataclass(frozen=True, slots=True)
class Claim:
    """The proof that a coordinator shows to have a stage: the name that it has proved, and its secret."""

    name: str | None = None
    secret: bytes = field(default=b"", repr=False)

    def equals(self, other: Claim) -> bool:
        """Return whether both are of one coordinator, if they name the same one.

        A target whose certificate has another name than before is known by its secret.
        """
        is_renamed = bool(self.secret) and _is_target(self.name) and _is_target(other.name)
        return (self.name == other.name or is_renamed) and hmac.compare_digest(self.secret, other.secret)

    def may_take_from(self, owner: Claim) -> bool:
        """Return whether whoever shows this may take a stage from its owner, who uses it under another name."""
        # None and an empty secret prove nothing, even if both have it.
        has_name = self.name is not None and self.name == owner.name
        return has_name or (bool(owner.secret) and self.equals(owner))


class NextAddresses:
    """The addresses at which a stage may dial the one that follows it: those named, as HOST:PORT, and near ones.

    Near are the addresses of the caller's own host, to which the caller needs no stage to get. Where links are
    authenticated every address is fine: only a coordinator gets here, and only a stage of the same CA is talked to.
    """

    def __init__(self, named: Sequence[str] = ()) -> None:
        self._named = frozenset(_canonical(address) for address in named)

    def check(self, address: str, caller: PeerIdentity) -> None:
        """Raise if the stage may not dial `address` for `caller`.

        Raises:
            InvalidRequest: it may not, or it is malformed; nothing was looked up or dialled.
        """
        # Names are compared as they are spelled: to resolve one would already tell the caller something.
        host, _ = parse_address(address)
        is_near = is_loopback(caller.host) if is_loopback(host) else bool(caller.host) and host == caller.host
        if not (caller.is_authenticated or is_near) and _canonical(address) not in self._named:
            raise InvalidRequest(
                "The stage may not dial the address of the next stage; start it with --next HOST:PORT for each stage "
                "that may follow it.",
                param="next_address",
            )


def _is_target(name: str | None) -> bool:
    identity = identity_of([] if name is None else [name])
    return identity is not None and identity.role == "target"


def _canonical(address: str) -> str:
    host, port = parse_address(address)
    return format_address(host.lower().rstrip("."), port)
