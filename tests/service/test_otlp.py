"""Spans over OTLP: what a collector receives over a real socket, and what happens without one."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from specsplit.core.errors import InvalidSettings, MissingExtra
from specsplit.telemetry import spans
from specsplit.telemetry.otlp import MAX_WAITING
from specsplit.telemetry.setup import sampler, sends_to_collector, tracing
from tests.support.rpc_servers import wait_until

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class FakeCollector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    collector, server = FakeCollector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        yield collector.requests
    finally:
        server.stop(None).wait()


def test_a_collector_gets_the_spans_that_the_file_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spans"
    with collecting(monkeypatch) as requests, tracing("target", path):
        with spans.span("rpc", method="VerifyDrafts") as outer:
            spans.record("forward", spans.current(), 5, 9, worker="target", num_tokens=3)
        assert isinstance(outer, spans.Span)
    (sent,) = [resource for request in requests for resource in request.resource_spans]
    about = {item.key: item.value.string_value for item in sent.resource.attributes}
    assert about["service.name"] == "specsplit-target"
    (scope,) = sent.scope_spans
    forward, rpc = scope.spans
    assert (forward.name, rpc.name, scope.scope.name) == ("forward", "rpc", "specsplit")
    assert forward.trace_id == rpc.trace_id == outer.trace_id.to_bytes(16, "big")
    assert (forward.parent_span_id, rpc.parent_span_id) == (outer.span_id.to_bytes(8, "big"), b"")
    assert (forward.start_time_unix_nano, forward.end_time_unix_nano) == (5, 9)
    values = {item.key: item.value for item in forward.attributes}
    assert (values["worker"].string_value, values["num_tokens"].int_value) == ("target", 3)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.parametrize(("num_spans", "least", "most"), [(500, 1, 32), (MAX_WAITING, 100, 512)])
async def test_spans_are_sent_a_few_at_a_time_unless_many_wait(
    monkeypatch: pytest.MonkeyPatch, num_spans: int, least: int, most: int
) -> None:
    with collecting(monkeypatch) as requests, tracing("target"):
        for number in range(num_spans):
            spans.record("forward", None, number, number + 1)

        def sent() -> list[Any]:
            return [request.resource_spans[0].scope_spans[0].spans for request in list(requests)]

        await wait_until(lambda: sum(map(len, sent())) == num_spans)
        assert [span.start_time_unix_nano for part in sent() for span in part] == list(range(num_spans))
        assert least <= max(map(len, sent())) <= most


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("specsplit.telemetry.otlp"):
            raise ModuleNotFoundError(name="opentelemetry")
        return real(name, *rest)

    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtra, match=r"specsplit\[otlp\]"), tracing("target"):
        pass
    assert not spans.is_on


@pytest.mark.parametrize(("name", "reason"), [("TIMEOUT", "'zstd'"), ("COMPRESSION", '"zstd"')])
def test_a_variable_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", "zstd")
    with pytest.raises(InvalidSettings, match=rf"OTEL_EXPORTER_OTLP_{name}\b.*{reason}"), tracing("target"):
        pass
    assert not spans.is_on


@pytest.mark.parametrize(
    ("protocols", "refused"),
    [
        ({"PROTOCOL": "http/protobuf"}, "PROTOCOL is http/protobuf"),
        ({"PROTOCOL": "grpc", "TRACES_PROTOCOL": "http/json"}, "TRACES_PROTOCOL is http/json"),
        ({"PROTOCOL": "http/protobuf", "TRACES_PROTOCOL": "grpc"}, None),
    ],
)
def test_a_protocol_that_is_not_spoken_is_refused(
    monkeypatch: pytest.MonkeyPatch, protocols: dict[str, str], refused: str | None
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    for name, protocol in protocols.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", protocol)
    expected = nullcontext() if refused is None else pytest.raises(InvalidSettings, match=rf"{refused}.*4317.*=none")
    with expected, tracing("target"):
        pass
    assert not spans.is_on


@pytest.mark.parametrize(
    ("environment", "sends"),
    [
        ({}, False),
        ({ENDPOINT: "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({ENDPOINT: "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://c:4317", "OTEL_TRACES_EXPORTER": "otlp,console"}, True),
        ({ENDPOINT: "http://c:4317", "OTEL_TRACES_EXPORTER": "console, otlp"}, True),
        ({ENDPOINT: "http://c:4317", "OTEL_TRACES_EXPORTER": "console"}, False),
        ({ENDPOINT: "http://c:4317", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_environment_says_whether_there_is_a_collector(environment: dict[str, str], *, sends: bool) -> None:
    assert sends_to_collector(environment) is sends


def test_the_environment_says_which_traces_are_recorded() -> None:
    kind, share = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
    assert sampler({})(7)
    assert not sampler({kind: "always_off"})(7)
    half = sampler({kind: "parentbased_traceidratio", share: "0.5"})
    assert half((1 << 127) | 7)
    assert not half((1 << 64) - 1)
    for wrong in ("2", "-1", "nan", "many"):
        with pytest.raises(InvalidSettings, match="share between 0 and 1"):
            sampler({kind: "traceidratio", share: wrong})
