"""Switches spans on: to a file, one JSON object a line, and to a collector over OTLP. Only the command line imports it.

A collector is named by OpenTelemetry's own variables, OTEL_EXPORTER_OTLP_ENDPOINT and those beside it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from specsplit.core.errors import InvalidSettings, MissingExtra
from specsplit.core.paths import expanded
from specsplit.telemetry import spans
from specsplit.telemetry.spans import Span

if TYPE_CHECKING:
    from specsplit.telemetry.otlp import Collector

PERIOD_S = 0.1
"""Longest time from the end of a span to its line."""
MAX_WAITING = 1 << 16
"""Spans that wait for a disk; beyond them the oldest are lost, since traces are never worth a worker's memory."""
_encode = json.JSONEncoder(separators=(",", ":")).encode
_MOST = 1 << 64
_log = logging.getLogger(__name__)


class SpanFile:
    """Writes spans as lines of JSON, in the order in which they end, several at a time from a thread of its own.

    Whoever ends a span only appends it to a queue: lines and system calls in between would cost a round more than all
    that a span is made of.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        ended: deque[Span] = deque(maxlen=MAX_WAITING)
        self._ended = ended
        self.add: spans.Sink = ended.append
        """Takes a span that has ended; any thread may call it."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="specsplit-trace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._is_over.set()
        self._thread.join()
        with suppress(OSError):  # the thread has said so
            self._file.close()

    def _write_all(self) -> None:
        is_over = False
        try:
            while not is_over:
                is_over = self._is_over.wait(PERIOD_S)
                if self._ended:
                    self._file.write("".join([_line(self._ended.popleft()) for _ in range(len(self._ended))]))
                    self._file.flush()
        except OSError as error:
            # What is traced goes on; what ends from now on pushes earlier spans out of the queue.
            _log.warning("the trace ends here, since its file cannot be written: %s", error.strerror)


def _line(span: Span) -> str:
    """Return a span as a line of JSON."""
    # By hand but for values that may need quoting: a round has a dozen spans.
    parent = f'"{span.parent_id:016x}"' if span.parent_id else "null"
    attributes = ",".join(
        [f'"{name}":{value if type(value) is int else _encode(value)}' for name, value in span.attributes.items()]
    )
    return (
        f'{{"name":"{span.name}","trace_id":"{span.trace_id:032x}","span_id":"{span.span_id:016x}",'
        f'"parent_id":{parent},"start_ns":{span.start_ns},"end_ns":{span.end_ns},'
        f'"duration_ms":{(span.end_ns - span.start_ns) / 1e6},"attributes":{{{attributes}}}}}\n'
    )


@contextmanager
def tracing(role: str, path: Path | None = None) -> Generator[None]:
    """Record the spans of the block, if a file is named or the environment names a collector.

    `path` is overwritten; a process that is killed loses the spans of its last moment, and may leave half a line. A
    request is not traced if its client says so.

    Raises:
        InvalidSettings: the file cannot be written, or a variable of the environment is wrong.
        MissingExtra: there is a collector, and the package that sends to it is not installed.
    """
    sends = sends_to_collector(os.environ)
    if path is None and not sends:
        yield
        return
    sinks: list[spans.Sink] = []
    with ExitStack() as stack:
        if path is not None:
            file = SpanFile(_opened(path))
            stack.callback(file.close)
            sinks.append(file.add)
        if sends:
            collector = _collector(role)
            stack.callback(collector.close)
            sinks.append(collector.add)
        stack.callback(spans.record_to, None)
        spans.record_to(sinks[0] if len(sinks) == 1 else _to_all(sinks), sampler(os.environ))
        yield


def trace_to_file(path: Path) -> AbstractContextManager[None]:
    """Record every span of the block in `path`; see `tracing`."""
    return tracing("specsplit", path)


def sends_to_collector(environment: Mapping[str, str]) -> bool:
    """Return whether an environment names a collector, in OpenTelemetry's own variables."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporters = [name.strip() for name in environment.get("OTEL_TRACES_EXPORTER", "otlp").split(",")]
    is_named = any(environment.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_"))
    return is_named and "otlp" in exporters and not is_off


def sampler(environment: Mapping[str, str]) -> Callable[[int], bool]:
    """Return which of the traces that begin here are recorded: all, or the share of OTEL_TRACES_SAMPLER_ARG.

    Raises:
        InvalidSettings: that share is none.
    """
    kind = environment.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_")
    if kind == "always_off":
        return lambda trace_id: False
    if kind != "traceidratio":
        return lambda trace_id: True
    written = environment.get("OTEL_TRACES_SAMPLER_ARG", "1")
    try:
        share = float(written)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InvalidSettings(f"OTEL_TRACES_SAMPLER_ARG must be a share between 0 and 1, not {written}.")
    # By the low half of the id, as OpenTelemetry does, so that all processes decide alike.
    return lambda trace_id: trace_id % _MOST < share * _MOST


def _to_all(sinks: list[spans.Sink]) -> spans.Sink:
    def add(span: Span) -> None:
        for sink in sinks:
            sink(span)

    return add


def _collector(role: str) -> Collector:
    _check_protocol(os.environ)
    try:
        from specsplit.telemetry.otlp import Collector
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "The environment names a collector of traces (OTEL_EXPORTER_OTLP_ENDPOINT), and what sends to it is not "
            "installed: pip install 'specsplit[otlp]', or set OTEL_TRACES_EXPORTER=none."
        ) from error
    return Collector(role)


def _check_protocol(environment: Mapping[str, str]) -> None:
    """Refuse an environment that names another protocol than the one that is spoken here.

    Raises:
        InvalidSettings: a collector would take the spans for something else, and all of them would be lost.
    """
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name, protocol = next(((name, environment[name]) for name in names if environment.get(name)), ("", "grpc"))
    if protocol != "grpc":
        raise InvalidSettings(
            f"Traces are sent over gRPC alone, and {name} is {protocol}: set it to grpc and the endpoint to the "
            "collector's gRPC port (4317), or set OTEL_TRACES_EXPORTER=none for no traces."
        )


def _opened(path: Path) -> TextIO:
    try:
        return expanded(path).open("w", encoding="utf-8")
    except OSError as error:
        message = f"The trace file {path} cannot be written ({error.strerror}); name another one."
        raise InvalidSettings(message) from error
