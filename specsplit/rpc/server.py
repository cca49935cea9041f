"""A gRPC server around any services: listening, health, reflection, drain. Knows nothing of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc
from grpc_reflection.v1alpha import reflection

from specsplit.core.errors import InvalidSettings
from specsplit.core.sections import ServiceSettings
from specsplit.limits import MAX_CALL_S, MAX_MESSAGE_BYTES, MAX_PROBES, MAX_REQUEST_BYTES
from specsplit.rpc.budget import ByteBudget
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.health import HEALTH_SERVICE, HealthService
from specsplit.rpc.interceptors import Boundary
from specsplit.rpc.listening import check_free
from specsplit.rpc.metrics_port import metrics_port
from specsplit.rpc.transport import format_address, parse_address, server_options
from specsplit.telemetry.statistics import StatisticsRole, WorkerStatistics

LIVENESS, READINESS = "liveness", "readiness"
_FLUSH_S = 0.5
"""Time for the last answers to leave after the last call has ended."""
_POLL_S = 0.05
_reflection = cast(Any, reflection)


class Service(Protocol):
    """A service as a server runs it; those of draft, target and stage implement it."""

    @property
    def role(self) -> StatisticsRole: ...

    def statistics(self) -> WorkerStatistics:
        """Return what it holds now, and its counts; the device is not asked."""
        ...

    @property
    def name(self) -> str:
        """Full name on the wire, as health checks and reflection use it."""
        ...

    @property
    def methods_while_draining(self) -> frozenset[str]:
        """Methods that are still answered while the server drains, until no session is open."""
        ...

    @property
    def num_sessions(self) -> int:
        """Sessions that a drain waits for."""
        ...

    @property
    def num_texts(self) -> int:
        """Sessions whose text does not go on without this worker: those of a target."""
        ...

    def handlers(self) -> grpc.GenericRpcHandler: ...

    def refuse(self) -> None:
        """Open no session any more, since the server drains."""
        ...

    def cut(self) -> None:
        """Note that what is open now ends with the server."""
        ...

    async def aclose(self) -> None:
        """End the tasks that the service itself began."""
        ...


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server for its callers."""

    max_call_s: float = MAX_CALL_S
    """Longest time of a call, whatever deadline its client set."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Size of the largest request; a larger one is refused before it is received."""
    max_request_bytes: int = MAX_REQUEST_BYTES
    """Size of all requests under way together; one too many is refused before it is parsed."""


@dataclass(frozen=True, slots=True)
class SidePorts:
    """Ports beside that of the calls, in plaintext and for everybody: for probes, and for Prometheus."""

    health: str | None = None
    metrics: str | None = None
    has_vllm_names: bool = False
    """Whether metrics have vLLM's names beside ours."""

    @classmethod
    def of(cls, settings: ServiceSettings) -> SidePorts:
        return cls(settings.health, settings.metrics, settings.metrics_compat == "vllm")


class Server:
    """One running server; made by `serving`."""

    def __init__(self, server: grpc.aio.Server, boundary: Boundary, services: Sequence[Service], address: str) -> None:
        self.address = address
        """Address as HOST:PORT, with the port that was bound."""
        self.health_address = ""
        """Address of the port for health checks alone; empty without one."""
        self.metrics_address = ""
        """Address of the port for Prometheus; empty without one."""
        self._server, self._boundary, self._services = server, boundary, services
        self._health = HealthService()
        server.add_generic_rpc_handlers([self._health.handlers(has_watch=True)])
        names = [service.name for service in services]
        _reflection.enable_server_reflection([*names, HEALTH_SERVICE, _reflection.SERVICE_NAME], server)
        self._names = names
        self._is_draining = False

    @property
    def num_running(self) -> int:
        """Calls under way."""
        return self._boundary.num_running

    def tell_health(self, *, is_ready: bool, is_live: bool) -> None:
        """Set the answer to health checks, as the first service has it; a draining server stays not ready."""
        for name in ("", READINESS, *self._names[:1]):
            self.tell_service(name, is_ready=is_ready and is_live)
        self._health.set(LIVENESS, is_serving=is_live)

    def tell_service(self, name: str, *, is_ready: bool) -> None:
        """Set the answer to health checks of one name; those of a draining server stay not ready."""
        self._health.set(name, is_serving=is_ready and not self._is_draining)

    @asynccontextmanager
    async def health_port(self, listen: str) -> AsyncGenerator[None]:
        """Answer health checks at `listen`, too, in plaintext and to everybody, for the length of the block.

        A probe of Kubernetes shows no certificate. Nobody can watch here, since a watch stays open for as long as its
        client likes. Raises InvalidSettings if nothing can listen there.
        """
        server = grpc.aio.server(options=server_options(max_streams=MAX_PROBES))
        server.add_generic_rpc_handlers([self._health.handlers(has_watch=False)])
        host, port = parse_address(listen, listening=True)
        self.health_address = format_address(host, await _listen(server, host, port, Security(is_insecure=True)))
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)

    @asynccontextmanager
    async def metrics_port(self, listen: str, *, has_vllm_names: bool) -> AsyncGenerator[None]:
        """Answer Prometheus at `listen` with the statistics of the services, for the length of the block.

        Raises InvalidSettings if nothing can listen there.
        """
        # Imported here: prometheus_client comes with what runs models, or with the gateway.
        from specsplit.telemetry.prometheus import WorkerMetrics

        metrics = WorkerMetrics(self._services, has_vllm_names=has_vllm_names)
        async with metrics_port(listen, metrics.page) as self.metrics_address:
            yield

    async def drain(self, grace_s: float = 10.0) -> int:
        """Open no new session, give open ones `grace_s` seconds to end, then stop; return how many answers were cut.

        A coordinator has that time to move its sessions from this stage to another one. Doing so again does no harm.
        """
        end_s = asyncio.get_running_loop().time() + grace_s
        self._is_draining = True
        for service in self._services:
            service.refuse()
        methods = frozenset(name for service in self._services for name in service.methods_while_draining)
        # Rounds of open sessions are still answered: [ no new session | no new call | stopped ].
        self._boundary.refuse(methods)
        for name in ("", READINESS, *self._names):
            self.tell_service(name, is_ready=False)
        await self._wait_sessions(end_s)
        num_texts = sum(service.num_texts for service in self._services)
        self._boundary.refuse()
        is_idle = await self._boundary.wait_idle(max(0.0, end_s - asyncio.get_running_loop().time()))
        # A session is cut between two of its calls as well, and has one under way at most.
        num_cut = max(self._boundary.num_answers, num_texts)
        for service in self._services:
            service.cut()
        self._boundary.end_rounds()
        await self._server.stop(_FLUSH_S if is_idle else None)
        await self._boundary.wait_idle(_FLUSH_S)
        return num_cut

    async def _wait_sessions(self, end_s: float) -> None:
        """Wait until no session is open, at most until `end_s`."""
        loop = asyncio.get_running_loop()
        while any(service.num_sessions for service in self._services) and loop.time() < end_s:  # noqa: ASYNC110 - another thread's count
            await asyncio.sleep(min(_POLL_S, max(0.0, end_s - loop.time())))

    async def wait(self) -> None:
        """Wait until the server has stopped."""
        await self._server.wait_for_termination()


@asynccontextmanager
async def serving(
    listen: str,
    services: Sequence[Service],
    limits: ServerLimits | None = None,
    security: Security = ON_LOOPBACK,
    ports: SidePorts = SidePorts(),
) -> AsyncGenerator[Server]:
    """Serve at `listen` for the length of the block; port 0 picks a free one.

    At the end of the block running calls are cancelled and the services closed, not what stands behind them; `drain`
    first to let calls end.

    Raises:
        InvalidRequest: `listen` is malformed.
        InvalidSettings: nothing can listen there, or not in plaintext; the message says why.
    """
    limits = limits or ServerLimits()
    security.check_listen(listen)
    host, port = parse_address(listen, listening=True)
    boundary = Boundary(limits.max_call_s, ByteBudget(limits.max_request_bytes), security.guard)
    server = grpc.aio.server(interceptors=[boundary], options=server_options(limits.max_message_bytes))
    server.add_generic_rpc_handlers([service.handlers() for service in services])
    bound_port = await _listen(server, host, port, security)
    running = Server(server, boundary, services, format_address(host, bound_port))
    running.tell_health(is_ready=True, is_live=True)
    for service in services[1:]:
        running.tell_service(service.name, is_ready=True)
    async with AsyncExitStack() as stack:
        if ports.health:
            await stack.enter_async_context(running.health_port(ports.health))
        if ports.metrics:
            await stack.enter_async_context(running.metrics_port(ports.metrics, has_vllm_names=ports.has_vllm_names))
        await server.start()
        try:
            yield running
        finally:
            await running.drain(0)
            for service in services:
                await service.aclose()


async def _listen(server: grpc.aio.Server, host: str, port: int, security: Security) -> int:
    """Bind, and return the port."""
    address = format_address(host, port)
    # gRPC would say only on stderr why it cannot bind.
    await check_free(host, port)
    try:
        return security.add_port(server, address)
    except RuntimeError as error:
        raise InvalidSettings(f"Nothing can listen at {address}; choose another port, or port 0.") from error
