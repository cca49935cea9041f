"""Spans of a token's route (request -> round -> propose, verify -> rpc -> forward), across processes.

They cost nothing until `telemetry.setup` switches them on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

T = TypeVar("T")
Attribute = str | int | float | bool
is_on = False
"""Whether spans are recorded. Code on the route of every token looks here first and skips its spans if not."""
_tracer: trace.Tracer | None = None
_NOTHING = nullcontext()
_W3C = TraceContextTextMapPropagator()


def use_tracer(tracer: trace.Tracer | None) -> None:
    """Record spans with `tracer`, or none at all; called by telemetry.setup only."""
    global _tracer, is_on
    _tracer, is_on = tracer, tracer is not None


def current() -> Context | None:
    """Return the caller's span context, to be handed to another thread; None if there is none."""
    if _tracer is None or not trace.get_current_span().get_span_context().is_valid:
        return None
    return otel_context.get_current()


def span(name: str, parent: Context | None = None, **attributes: Attribute) -> AbstractContextManager[object]:
    """Record the block as a child of `parent`, by default of the current span."""
    if _tracer is None:
        return _NOTHING
    return _tracer.start_as_current_span(name, context=parent, attributes=attributes)


async def around(
    work: Awaitable[T],
    name: str,
    describe: Callable[[T], Mapping[str, Attribute]],
    parent: Context | None = None,
    **attributes: Attribute,
) -> T:
    """Await `work` in a span, which also gets the attributes that `describe` returns for the result."""
    with span(name, parent, **attributes):
        result = await work
        annotate(**describe(result))
    return result


def annotate(**attributes: Attribute) -> None:
    """Add attributes to the current span, those that only its end shows."""
    if _tracer is not None:
        trace.get_current_span().set_attributes(attributes)


def inject() -> tuple[tuple[str, str], ...]:
    """Return the caller's span context as metadata for another process (W3C); empty while spans are off."""
    if _tracer is None:
        return ()
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> Context | None:
    """Return the span context that another process put into `metadata`; None while spans are off or without one.

    A malformed context counts as none.
    """
    if _tracer is None:
        return None
    # Peers send what they like: bytes, other keys, nonsense. A trace is never worth failing a request.
    carrier = {key: value for key, value in metadata if key in _W3C.fields and isinstance(value, str)}
    context = _W3C.extract(carrier, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def current_span_id() -> bytes:
    """Return the 8 bytes of the current span's id; empty outside of a span and while spans are off."""
    if _tracer is None:
        return b""
    context = trace.get_current_span().get_span_context()
    return context.span_id.to_bytes(8, "big") if context.is_valid else b""


# `start_as_current_span` sets a context variable and resets it in the same context. An async generator may be resumed
# in another one after each yield, where that reset would raise.
class OpenSpan:
    """A span that is never the current one, so it may stay open across the yields of an async generator."""

    def __init__(self, name: str, **attributes: Attribute) -> None:
        self._span = _tracer.start_span(name, attributes=attributes) if _tracer is not None else None
        self.context = trace.set_span_in_context(self._span) if self._span is not None else None
        """Parent for the spans inside it; None while spans are off."""

    def end(self) -> None:
        if self._span is not None:
            self._span.end()


def record(name: str, parent: Context | None, start_ns: int, end_ns: int, **attributes: Attribute) -> None:
    """Record a finished span (time.time_ns clock) under `parent`."""
    if _tracer is not None:
        _tracer.start_span(name, context=parent, start_time=start_ns, attributes=attributes).end(end_ns)
