"""The ports of a cut target: a stage, and the link down a chain of them; in process, over gRPC and as test fakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from specsplit.core.exactness import Exactness
from specsplit.stages.identity import StageIdentity
from specsplit.stages.packet import Packet
from specsplit.stages.slot_state import SlotState


@dataclass(slots=True)
class StageStatistics:
    """Counts since the start; the device thread writes them, or the event loop while that has nothing to do."""

    num_packets: int = 0
    """Packets computed."""
    num_tokens: int = 0
    num_sessions: int = 0
    """Sessions in these packets, each packet's counted anew."""
    busy_s: float = field(default=0.0, compare=False)
    """Seconds of computing them."""
    num_behind: int = 0
    """Packets sent back since slots held too few rows."""

    def add(self, num_tokens: int, num_sessions: int, elapsed_s: float) -> None:
        """Count a packet that was computed."""
        self.num_packets += 1
        self.num_tokens += num_tokens
        self.num_sessions += num_sessions
        self.busy_s += elapsed_s


class Stage(Protocol):
    """Runs packets through some layers; its coordinator owns the slots and says what they hold."""

    @property
    def identity(self) -> StageIdentity: ...

    @property
    def statistics(self) -> StageStatistics:
        """Return the counts of its packets since it began."""
        ...

    @property
    def num_rows(self) -> Sequence[int]:
        """Return the rows that each slot holds; anybody may ask at any time."""
        ...

    async def place(self, index: int, num_stages: int) -> None:
        """Take position `index` in a chain of `num_stages`, from the next packet on."""
        ...

    async def reset(self) -> None:
        """Forget what all slots hold."""
        ...

    async def forward(self, packet: Packet) -> Packet:
        """Apply the packet's keep-list to the last step, write its rows and return the packet for the next stage.

        Packets are taken in the order of the calls.

        Raises:
            InvalidPacket: the packet does not fit this stage, or its hidden states are not finite; nothing changed
                but the slots' lengths.
            StaleEpoch: a later epoch of a slot was seen; nothing changed.
            StageBehind: slots hold fewer or other rows than the packet builds on; nothing was computed.
        """
        ...

    @property
    def is_well(self) -> bool:
        """Whether its device computes: its last steps did not all fail for a reason of the device."""
        ...

    def forward_now(self, packet: Packet) -> Packet | None:
        """Do what `forward` does before it returns; None, and nothing done, if it takes too long for an event loop."""
        ...

    async def end(self, slot: int, epoch: int | None = None) -> None:
        """Forget what a slot holds, its epoch included.

        With an `epoch` only what was written until its end: that of a later one stays, and packets of it or an earlier
        one are refused from now on.
        """
        ...

    async def export_kv(self, slot: int) -> SlotState:
        """Return what a slot holds, the rows of its last step included, and nothing behind them."""
        ...

    async def import_kv(self, state: SlotState) -> None:
        """Take over what the same layers held in a slot elsewhere.

        Raises:
            InvalidPacket: it does not fit this stage; nothing changed.
        """
        ...


class StageLink(Protocol):
    """The way down a chain as its coordinator sees it, without addresses and connections."""

    @property
    def num_stages(self) -> int: ...

    @property
    def is_down(self) -> bool:
        """Whether a stage is known to be lost that could not be replaced: sending again would only fail at once."""
        ...

    @property
    def exactness(self) -> Exactness:
        """Return "bits" if all stages say so, with the same numerics."""
        ...

    @property
    def numerics(self) -> str:
        """Return the numerics that all stages have, empty if they differ or are unknown."""
        ...

    @property
    def revision(self) -> int:
        """Return how often the two have changed since the chain was connected first."""
        ...

    async def send(self, packet: Packet) -> Packet:
        """Send a packet through the whole chain and return the last stage's answer to it.

        Packets reach every stage in the order of the calls. Several may be under way.

        Raises:
            SpecSplitError: the error of a stage; CorruptPacket: the packet or its answer was damaged.
            LinkError: a stage is lost.
        """
        ...


@runtime_checkable
class SlotReleaser(Protocol):
    """A StageLink that can inform stages that a slot's session has ended."""

    def end(self, slot: int, epoch: int) -> None:
        """Have every stage forget what a slot held until the end of an epoch; waits for none, and never fails."""
        ...
