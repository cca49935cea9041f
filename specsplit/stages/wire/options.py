"""How long a coordinator waits for its stages; knows nothing of connections."""

from __future__ import annotations

from dataclasses import dataclass, field

from specsplit.core.defaults import STEP_TIMEOUT_S
from specsplit.rpc.clients import CALL_TIMEOUT_S

RECONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Patience of a RemoteChain, and whether it takes stages from others."""

    call_timeout_s: float = CALL_TIMEOUT_S
    """The limit of a packet's way down the chain and back."""
    reconnect_s: float = RECONNECT_S
    """How long a packet waits for a lost stage."""
    step_timeout_s: float = STEP_TIMEOUT_S
    """A stage that computes one step for longer hangs, and counts as lost even while it answers pings."""
    takeover: bool = False
    """Take stages from another coordinator that still uses them: with its `secret`, or under its proved name."""
    secret: bytes | None = field(default=None, repr=False)
    """Secret with which stages are configured, by default one that the chain draws when it is made."""
