"""Counts of a coordinator's chain, and a stage's as a worker's; knows nothing of how a chain is restored."""

from __future__ import annotations

from dataclasses import dataclass, field

from specsplit.stages.ports import Stage
from specsplit.stages.wire.connection import Connection
from specsplit.telemetry.statistics import StepCounts, WorkerStatistics


def stage_statistics(stage: Stage, num_running: int) -> WorkerStatistics:
    """Return what a stage holds now, and its counts; attributes are read, the device is not asked."""
    identity, counts = stage.identity, stage.statistics
    num_used = sum(rows > 0 for rows in stage.num_rows)
    return WorkerStatistics(
        model=identity.model,
        layers=(identity.start, identity.end),
        num_sessions=num_used,
        num_slots=identity.num_slots,
        num_slots_used=num_used,
        num_running=num_running,
        used_bytes=sum(stage.num_rows) * identity.kv_bytes_per_token,
        budget_bytes=identity.kv_rows * identity.kv_bytes_per_token,
        steps=StepCounts(counts.num_packets, counts.num_tokens, counts.num_sessions, counts.busy_s),
    )


@dataclass(slots=True)
class RemoteChainStatistics:
    """Counts since the start."""

    num_connections: int = 0
    """Times that the chain was configured, the first one among them."""
    num_tries: int = 0
    """Attempts to restore the chain, the successful ones included."""
    spares_used: list[str] = field(default_factory=list[str])
    """Addresses, in the order in which they took over."""
    num_moved_slots: int = 0
    moved_bytes: int = 0
    num_late: int = 0
    """Answers and errors that came when nobody waited any more."""
    link_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of packets on the coordinator's own links, by `coordinator->ADDRESS` and `ADDRESS->coordinator`."""

    @property
    def num_reconnects(self) -> int:
        return max(0, self.num_connections - 1)

    def add(self, connection: Connection) -> None:
        """Count what went over a connection."""
        self.num_late += connection.num_late
        first = connection.peers[0].address
        counted = [(f"coordinator->{first}", connection.sent_bytes)]
        for peer, reader in zip(connection.peers, connection.readers, strict=True):
            counted.append((f"{peer.address}->coordinator", reader.num_bytes))
        for link, num_bytes in counted:
            self.link_bytes[link] = self.link_bytes.get(link, 0) + num_bytes
