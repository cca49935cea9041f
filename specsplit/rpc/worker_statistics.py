"""The Stats call of draft, target and stage: statistics as a message, both ways, and a client that reads them.

Knows no session and no role's other calls; whoever watches a worker takes none of its time but an answer's.
"""

from __future__ import annotations

from specsplit.core.errors import InvalidRequest, PeerMismatch, SpecSplitError, WorkerFailed
from specsplit.core.record import record
from specsplit.rpc import calls
from specsplit.rpc.channel import WorkerChannel
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.pb import common_pb2
from specsplit.rpc.words import clean_name
from specsplit.telemetry.statistics import StatisticsRole, StepCounts, TreeCounts, WorkerStatistics

_SERVICES: dict[StatisticsRole, str] = {
    "draft": "/specsplit.v1.DraftService/",
    "target": "/specsplit.v1.TargetService/",
    "stage": "/specsplit.v1.StageService/",
}


def encode_statistics(statistics: WorkerStatistics, version: str, uptime_s: float) -> common_pb2.StatsResponse:
    """Return the message of statistics."""
    steps, trees = statistics.steps, statistics.trees
    start, end = statistics.layers or (0, 0)
    return common_pb2.StatsResponse(
        model=statistics.model,
        version=version,
        uptime_us=round(uptime_s * 1e6),
        num_sessions=statistics.num_sessions,
        num_slots=statistics.num_slots,
        num_slots_used=statistics.num_slots_used,
        num_slots_warm=statistics.num_slots_warm,
        num_waiting=statistics.num_waiting,
        num_running=statistics.num_running,
        used_bytes=statistics.used_bytes,
        budget_bytes=statistics.budget_bytes,
        num_steps=steps.num_steps,
        num_rows=steps.num_rows,
        num_sequences=steps.num_sequences,
        busy_us=round(steps.busy_s * 1e6),
        num_tokens=trees.num_tokens,
        num_tree_rounds=trees.num_tree_rounds,
        num_nodes=trees.num_nodes,
        num_accepted=trees.num_accepted,
        num_reused_tokens=statistics.num_reused_tokens,
        num_refused=statistics.num_refused,
        num_preempted=statistics.num_preempted,
        start=start,
        end=end,
    )


def decode_statistics(message: common_pb2.StatsResponse) -> WorkerStatistics:
    """Return the statistics that a worker states."""
    return WorkerStatistics(
        model=clean_name(message.model),
        layers=(message.start, message.end) if message.end else None,
        num_sessions=message.num_sessions,
        num_slots=message.num_slots,
        num_slots_used=message.num_slots_used,
        num_slots_warm=message.num_slots_warm,
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        used_bytes=message.used_bytes,
        budget_bytes=message.budget_bytes,
        steps=StepCounts(message.num_steps, message.num_rows, message.num_sequences, message.busy_us / 1e6),
        trees=TreeCounts(message.num_tokens, message.num_tree_rounds, message.num_nodes, message.num_accepted),
        num_reused_tokens=message.num_reused_tokens,
        num_refused=message.num_refused,
        num_preempted=message.num_preempted,
    )


@record
class StatisticsReading:
    """The answer of a worker that was asked for its statistics."""

    statistics: WorkerStatistics
    version: str
    """Version of the worker's package."""
    uptime_s: float


class StatisticsReader:
    """Reads the statistics of one worker again and again, over one connection."""

    def __init__(self, role: StatisticsRole, address: str, security: Security = ON_LOOPBACK) -> None:
        """Name the worker.

        Raises:
            InvalidRequest: the address is malformed.
            InvalidSettings: the link would leave this machine in plaintext.
        """
        self.role: StatisticsRole = role
        self.address, self.security = address, security
        self._peer = f"The {role} at {address}"
        self._channel = WorkerChannel(address, self._peer, role, security)

    async def read(self, timeout_s: float) -> StatisticsReading | None:
        """Return the worker's statistics; None if it is of an older release, which tells none.

        Raises:
            PeerMismatch: it is no worker of this role.
            LinkError: it cannot be reached in time, or failed.
        """
        try:
            data = await self._call("Stats", common_pb2.StatsRequest().SerializeToString(), timeout_s)
        except PeerMismatch as error:
            if await self._answers_pings(timeout_s):
                return None
            raise PeerMismatch(f"At {self.address} is no {self.role}; check address and role.") from error
        try:
            message = calls.parse(common_pb2.StatsResponse, data)
        except InvalidRequest as error:
            raise WorkerFailed(f"{self._peer} gave a malformed answer: {error}") from error
        return StatisticsReading(decode_statistics(message), clean_name(message.version), message.uptime_us / 1e6)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._channel.aclose()

    async def _call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        return await self._channel.call(_SERVICES[self.role] + method, request, timeout_s)

    async def _answers_pings(self, timeout_s: float) -> bool:
        """Return whether there is a worker of this role, which has answered pings in every release."""
        try:
            await self._call("Ping", common_pb2.PingRequest().SerializeToString(), timeout_s)
        except SpecSplitError:
            return False
        return True
