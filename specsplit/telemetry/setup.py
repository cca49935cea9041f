"""Writes spans to a file, one JSON object a line, in the order in which they end. Only the command line imports it."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from specsplit.core.errors import InvalidSettings
from specsplit.core.paths import expanded
from specsplit.telemetry import spans


class JsonLinesExporter(SpanExporter):
    """Writes spans as lines of JSON; spans end in several threads, so one lock owns the file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write each span as one line."""
        lines = [json.dumps(_record(span), separators=(",", ":")) + "\n" for span in spans]
        with self._lock:
            # A thread may outlive the block that traces; its spans come too late to be written.
            if self._file.closed:
                return SpanExportResult.FAILURE
            self._file.writelines(lines)
        return SpanExportResult.SUCCESS

    def close(self) -> None:
        """Flush and close the file."""
        with self._lock:
            self._file.close()


def _record(span: ReadableSpan) -> dict[str, object]:
    context = span.get_span_context()
    assert context is not None, "a recorded span has a context"
    assert span.start_time is not None, "a recorded span has started"
    assert span.end_time is not None, "only ended spans are exported"
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "duration_ms": (span.end_time - span.start_time) / 1e6,
        "attributes": dict(span.attributes or {}),
    }


@contextmanager
def trace_to_file(path: Path) -> Generator[None]:
    """Record every span of the block in `path`, which is overwritten; a process that is killed leaves whole lines.

    Raises:
        InvalidSettings: the file cannot be written.
    """
    try:
        file = expanded(path).open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        message = f"The trace file {path} cannot be written ({error.strerror}); name another one."
        raise InvalidSettings(message) from error
    exporter = JsonLinesExporter(file)
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans.use_tracer(provider.get_tracer("specsplit"))
    try:
        yield
    finally:
        spans.use_tracer(None)
        provider.shutdown()
        exporter.close()
