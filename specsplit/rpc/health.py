"""The service of health checks, `grpc.health.v1`: a status for each name. Knows neither workers nor devices.

grpcio's own writes to a watcher under the lock that a change of status takes, so one watcher that reads nothing would
keep every later status from everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2

HEALTH_SERVICE = cast(str, cast(Any, health).SERVICE_NAME)
_pb2 = cast(Any, health_pb2)
_STATUS = _pb2.HealthCheckResponse


class HealthService:
    """Answers checks, and tells watchers of each change."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set with the next change of any status, and another event from then on."""

    def set(self, name: str, *, is_serving: bool) -> None:
        """Set the status of a name."""
        status = _STATUS.SERVING if is_serving else _STATUS.NOT_SERVING
        if self._statuses.get(name) != status:
            self._statuses[name] = status
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def handlers(self, *, has_watch: bool) -> grpc.GenericRpcHandler:
        """Return the handlers of `Check`, and of `Watch` if the port `has_watch`."""
        coders = {
            "request_deserializer": _pb2.HealthCheckRequest.FromString,
            "response_serializer": _STATUS.SerializeToString,
        }
        methods = {"Check": grpc.unary_unary_rpc_method_handler(cast(Any, self._check), **coders)}
        if has_watch:
            methods["Watch"] = grpc.unary_stream_rpc_method_handler(cast(Any, self._watch), **coders)
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _STATUS(status=status)

    async def _watch(self, request: Any, _: Any) -> AsyncGenerator[Any]:
        last: int | None = None
        while True:
            # The event is taken before the status is read, so that no change comes between the two.
            changed = self._changed
            status = self._statuses.get(request.service, _STATUS.SERVICE_UNKNOWN)
            if status != last:
                yield _STATUS(status=status)
            last = status
            await changed.wait()
