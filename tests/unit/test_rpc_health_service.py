"""The service of health checks without a server: what watchers hear of a change."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from specsplit.rpc.health import HealthService
from tests.support.rpc_servers import NOT_SERVING, SERVING


@pytest.fixture
def service() -> HealthService:
    service = HealthService()
    service.set("readiness", is_serving=True)
    return service


def watch(service: HealthService, name: str) -> AsyncGenerator[Any]:
    details: Any = SimpleNamespace(method="/grpc.health.v1.Health/Watch")
    handler: Any = service.handlers(has_watch=True).service(details)
    return handler.unary_stream(health_pb2.HealthCheckRequest(service=name), None)


async def test_a_watcher_that_takes_nothing_keeps_no_change_from_others(service: HealthService):
    stuck, other = watch(service, "readiness"), watch(service, "readiness")
    assert [(await anext(each)).status for each in (stuck, other)] == [SERVING] * 2
    service.set("readiness", is_serving=False)  # while gRPC cannot write the first one's answer
    assert (await anext(other)).status == NOT_SERVING
    service.set("readiness", is_serving=True)
    assert (await anext(other)).status == SERVING
    service.set("readiness", is_serving=False)
    assert (await anext(stuck)).status == NOT_SERVING  # the latest one


async def test_a_name_can_be_watched_before_it_has_a_status(service: HealthService):
    watched = watch(service, "later")
    assert (await anext(watched)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    service.set("later", is_serving=True)
    assert (await anext(watched)).status == SERVING
