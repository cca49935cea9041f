"""Sends spans to a collector over OTLP, every second from a thread of its own; needs the extra `otlp`.

Endpoint, headers, certificates and the rest are those of OpenTelemetry's variables, which its exporter reads.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from specsplit.core.errors import InvalidSettings
from specsplit.telemetry.spans import Span

PERIOD_S = 1.0
MAX_WAITING = 8192
"""Spans that wait for a collector; beyond them the oldest are lost, since traces are never worth a worker's memory."""
_BATCH, _LARGE_BATCH = 32, 512
"""Spans of one call: encoding them holds the interpreter's lock, for which all other threads wait meanwhile. Calls are
larger at the end, and while more than half of MAX_WAITING waits, as it does for a collector that is far away."""
_PAUSE_S = 0.002
"""Time between two calls, in which others get the lock for certain."""
_LAST_S = 2.0
"""Longest wait for the collector at the end."""
_KINDS = {"http": SpanKind.SERVER, "rpc": SpanKind.SERVER, "propose": SpanKind.CLIENT, "verify": SpanKind.CLIENT}


class Collector:
    """The spans of one process on their way to the collector that its environment names."""

    def __init__(self, role: str) -> None:
        """Begin to send.

        Raises:
            InvalidSettings: a variable of the environment is wrong.
        """
        self._exporter = _exporter()
        self._resource = _resource(role)
        self._scope = InstrumentationScope("specsplit", version("specsplit"))
        self._waiting: deque[Span] = deque(maxlen=MAX_WAITING)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="specsplit-otlp", daemon=True)
        self._thread.start()

    def add(self, span: Span) -> None:
        """Take a span that has ended."""
        self._waiting.append(span)

    def close(self) -> None:
        """Send what is left, and end."""
        self._is_over.set()
        self._thread.join(_LAST_S)
        self._exporter.shutdown()

    def _send_all(self) -> None:
        while True:
            is_last = self._is_over.wait(PERIOD_S)
            while self._waiting:
                num_waiting = len(self._waiting)
                is_urgent = num_waiting > MAX_WAITING // 2 or self._is_over.is_set()
                count = min(_LARGE_BATCH if is_urgent else _BATCH, num_waiting)
                # The exporter waits and tries again by itself, and logs what it could not deliver.
                self._exporter.export([self._theirs(self._waiting.popleft()) for _ in range(count)])
                if not is_urgent:
                    time.sleep(_PAUSE_S)
            if is_last:
                return

    def _theirs(self, span: Span) -> ReadableSpan:
        """Return a span as OpenTelemetry has it."""
        flags = TraceFlags(TraceFlags.SAMPLED)
        parent = SpanContext(span.trace_id, span.parent_id, True, flags) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace_id, span.span_id, False, flags),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=_KINDS.get(span.name, SpanKind.INTERNAL),
            instrumentation_scope=self._scope,
            start_time=span.start_ns,
            end_time=span.end_ns,
        )


def _exporter() -> SpanExporter:
    try:
        return OTLPSpanExporter()
    except Exception as error:  # each variable that it reads has an exception of its own
        given = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_EXPORTER_OTLP_")))
        raise InvalidSettings(f"OpenTelemetry takes no spans with these variables ({given}): {error}.") from error


def _resource(role: str) -> Resource:
    """Return what spans say about this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    named = Resource.create({"service.version": version("specsplit")})
    if str(named.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        return named.merge(Resource({SERVICE_NAME: f"specsplit-{role}"}))
    return named
