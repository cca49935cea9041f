"""Counts of a coordinator's chain; knows nothing of how it is restored."""

from __future__ import annotations

from dataclasses import dataclass, field

from specsplit.stages.wire.connection import Connection


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
