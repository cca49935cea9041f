"""Counts of a coordinator's chain, and a stage's as a worker's; knows nothing of how a chain is restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specsplit.core.errors import SpecSplitError
from specsplit.engine.quotas import CallerQuotas
from specsplit.rpc.servicers import WorkerFront
from specsplit.stages.chain.statistics import ChainStatistics
from specsplit.stages.ports import Stage
from specsplit.stages.wire.connection import Connection
from specsplit.telemetry.statistics import StepCounts, WorkerLoad, WorkerStatistics


def stage_statistics(stage: Stage, num_running: int, received_bytes: int, sent_bytes: int) -> WorkerStatistics:
    """Return what a stage holds now, and its counts; attributes are read, the device is not asked.

    `received_bytes` and `sent_bytes` are those of packets since it began.
    """
    identity, counts = stage.identity, stage.statistics
    return WorkerStatistics(
        model=identity.model,
        layers=(identity.start, identity.end),
        num_slots=identity.num_slots,
        num_slots_used=sum(rows > 0 for rows in stage.num_rows),
        num_running=num_running,
        used_bytes=sum(stage.num_rows) * identity.kv_bytes_per_token,
        budget_bytes=identity.kv_rows * identity.kv_bytes_per_token,
        steps=StepCounts(counts.num_packets, counts.num_tokens, counts.num_sessions, counts.busy_s),
        link_bytes={("stages", "received"): received_bytes, ("stages", "sent"): sent_bytes},
    )


class ChainFront:
    """The front of a cut target's engine, whose statistics have those of its chain, too."""

    def __init__(self, engine: WorkerFront, link: Callable[[], RemoteChainStatistics], sent: ChainStatistics) -> None:
        self._engine, self._link, self._sent = engine, link, sent

    @property
    def load(self) -> WorkerLoad:
        return self._engine.load

    @property
    def quotas(self) -> CallerQuotas:
        return self._engine.quotas

    def worker_statistics(self) -> WorkerStatistics:
        # Summed up: a page that everybody may read names no addresses.
        link_bytes = {("stages", "sent"): 0, ("stages", "received"): 0}
        for link, num_bytes in self._link().link_bytes.items():
            link_bytes["stages", "sent" if link.startswith("coordinator->") else "received"] += num_bytes
        resyncs = {str(reason): count for reason, count in self._sent.num_resends.items()}
        return replace(self._engine.worker_statistics(), num_resyncs=resyncs, link_bytes=link_bytes)

    def abandon(self, sessions: Sequence[str]) -> None:
        self._engine.abandon(sessions)

    def refuse_waiting(self, error: Callable[[], SpecSplitError]) -> None:
        self._engine.refuse_waiting(error)


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
