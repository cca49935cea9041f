"""A gRPC server around a drafter, verifier or stage: listening, health, reflection, drain. Knows nothing of engines."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specsplit.core.errors import InvalidSettings
from specsplit.core.ports import Drafter, Verifier
from specsplit.rpc.budget import MAX_REQUEST_BYTES, ByteBudget
from specsplit.rpc.interceptors import MAX_CALL_S, Boundary
from specsplit.rpc.servicers import DRAFT_SERVICE, TARGET_SERVICE, draft_handlers, target_handlers
from specsplit.rpc.transport import MAX_MESSAGE_BYTES, format_address, parse_address, server_options
from specsplit.stages.ports import Stage
from specsplit.stages.wire.servicer import STAGE_SERVICE, StageService

LIVENESS, READINESS = "liveness", "readiness"
_FLUSH_S = 0.5
_LOOK_S = 0.05
"""For the last answers to leave after the last call has ended."""
_health, _health_pb2, _reflection = cast(Any, health), cast(Any, health_pb2), cast(Any, reflection)
_SERVING = _health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = _health_pb2.HealthCheckResponse.NOT_SERVING


class Server:
    """One running server; made by `serving`."""

    def __init__(
        self,
        server: grpc.aio.Server,
        boundary: Boundary,
        health_servicer: Any,
        services: list[str],
        address: str,
        num_sessions: Callable[[], int],
        stage: StageService | None = None,
    ) -> None:
        self._server, self._boundary, self._health = server, boundary, health_servicer
        self._num_sessions, self._stage = num_sessions, stage
        self._is_draining = False
        self._ready_names = ["", READINESS, *services]
        self._told: dict[str, Any] = {}
        self.address = address
        """HOST:PORT, with the port that was really bound."""

    @property
    def num_running(self) -> int:
        """Calls under way."""
        return self._boundary.num_running

    async def tell_health(self, *, is_ready: bool, is_live: bool) -> None:
        """Answer health checks so from now on; a server that drains stays not ready."""
        is_ready = is_ready and is_live and not self._is_draining
        for name in self._ready_names:
            await self._tell(name, _SERVING if is_ready else _NOT_SERVING)
        await self._tell(LIVENESS, _SERVING if is_live else _NOT_SERVING)

    async def _tell(self, name: str, status: Any) -> None:
        if self._told.get(name) != status:  # whoever watches hears of changes only
            self._told[name] = status
            await self._health.set(name, status)

    async def drain(self, grace_s: float = 10.0) -> None:
        """Open no session any more, give those open `grace_s` seconds to end, then stop; again does no harm.

        The coordinator of a stage has that time to move its sessions to another one.
        """
        end_s = asyncio.get_running_loop().time() + grace_s
        self._is_draining = True
        if self._stage is None:
            self._boundary.refuse()
        else:
            self._stage.refuse()
        for name in self._ready_names:
            await self._tell(name, _NOT_SERVING)
        await self._sessions_end(end_s)
        self._boundary.refuse()
        is_idle = await self._boundary.wait_idle(max(0.0, end_s - asyncio.get_running_loop().time()))
        self._boundary.end_rounds()
        await self._server.stop(_FLUSH_S if is_idle else None)
        await self._boundary.wait_idle(_FLUSH_S)

    async def _sessions_end(self, end_s: float) -> None:
        """Wait until no session is open, at most until `end_s`."""
        loop = asyncio.get_running_loop()
        while self._num_sessions() and loop.time() < end_s:  # noqa: ASYNC110 - another thread's count
            await asyncio.sleep(min(_LOOK_S, max(0.0, end_s - loop.time())))

    async def wait(self) -> None:
        """Wait until the server has stopped."""
        await self._server.wait_for_termination()


@asynccontextmanager
async def serving(
    *,
    listen: str,
    drafter: Drafter | None = None,
    verifier: Verifier | None = None,
    stage: Stage | None = None,
    num_sessions: Callable[[], int] = lambda: 0,
    max_call_s: float = MAX_CALL_S,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_request_bytes: int = MAX_REQUEST_BYTES,
) -> AsyncGenerator[Server]:
    """Serve the workers given at `listen` for the length of the block; the workers stay the caller's to close.

    Port 0 picks a free one; `num_sessions` tells how many sessions a drain has to wait for (it waits for a stage's
    coordinator in any case); no call runs longer than `max_call_s`, whatever deadline its client set. A request of more
    than `max_message_bytes` is refused before it is received; those under way hold at most `max_request_bytes`
    together, and one too many is refused before it is parsed. At the end of the block running calls are cancelled;
    `drain` first to let them end.

    Raises:
        InvalidRequest: `listen` is malformed.
        InvalidSettings: nothing can listen there, and why.
    """
    host, port = parse_address(listen, listening=True)
    boundary = Boundary(max_call_s, ByteBudget(max_request_bytes))
    server = grpc.aio.server(interceptors=[boundary], options=server_options(max_message_bytes))
    services: list[str] = []
    if drafter is not None:
        server.add_generic_rpc_handlers([draft_handlers(drafter, lambda: boundary.is_draining)])
        services.append(DRAFT_SERVICE)
    if verifier is not None:
        server.add_generic_rpc_handlers([target_handlers(verifier, lambda: boundary.is_draining)])
        services.append(TARGET_SERVICE)
    stage_service = StageService(stage) if stage is not None else None
    if stage_service is not None:
        server.add_generic_rpc_handlers([stage_service.handlers()])
        services.append(STAGE_SERVICE)
    health_servicer = _health.aio.HealthServicer()
    _add_standard_services(server, health_servicer, services)
    bound_port = await _listen(server, host, port)
    address = format_address(host, bound_port)
    count = num_sessions if stage_service is None else lambda: num_sessions() + stage_service.num_coordinators
    running = Server(server, boundary, health_servicer, services, address, count, stage_service)
    await running.tell_health(is_ready=True, is_live=True)
    await server.start()
    try:
        yield running
    finally:
        await running.drain(0)
        if stage_service is not None:
            await stage_service.aclose()


def _add_standard_services(server: grpc.aio.Server, health_servicer: Any, services: list[str]) -> None:
    cast(Any, health_pb2_grpc).add_HealthServicer_to_server(health_servicer, server)
    names = [*services, _health.SERVICE_NAME, _reflection.SERVICE_NAME]
    _reflection.enable_server_reflection(names, server)


async def _listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind, and return the port; a trial bind goes first, since gRPC says why it failed only on stderr."""
    address = format_address(host, port)
    await check_free(host, port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidSettings(f"Nothing can listen at {address}; choose another port, or port 0.") from error


async def check_free(host: str, port: int) -> None:
    """Refuse an address where nothing can listen.

    Raises:
        InvalidSettings: it is in use, or none of this machine's.
    """
    address = format_address(host, port)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidSettings(f"The host of {address} has no address here; listen at 0.0.0.0 or 127.0.0.1.") from error
    failures: list[OSError] = []
    for family, kind, protocol, _, bind_to in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind(bind_to)
                trial.listen(1)
        except OSError as failure:
            failures.append(failure)
    in_use = next((failure for failure in failures if failure.errno == errno.EADDRINUSE), None)
    if in_use is not None:
        raise InvalidSettings(f"{address} is in use; stop what listens there, or choose another port (0 picks one).")
    if len(failures) == len(found):
        reason = os.strerror(failures[0].errno or errno.EADDRNOTAVAIL).lower()
        raise InvalidSettings(f"Nothing can listen at {address} ({reason}); choose an address of this machine.")
