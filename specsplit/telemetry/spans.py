"""Spans of a token's route (http -> request -> round -> propose, verify -> rpc -> forward, stage), across processes.

They cost nothing until `telemetry.setup` switches them on, and little then: a span is one small object of ours, since
a round has a dozen, and those of OpenTelemetry's SDK take several times as long. `telemetry.otlp` makes theirs of ours.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
Attribute = str | int | float | bool
is_on = False
"""Whether spans are recorded. Code on the route of every token looks here first and skips its spans if not."""
_NOTHING = nullcontext()
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""W3C trace context, version 0."""
# A generator of our own: whoever seeds the global one shall get the same numbers with spans and without.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


class SpanContext:
    """Names a span to those below it, here or in another process; below one that is not sampled nothing is recorded."""

    __slots__ = ("is_sampled", "span_id", "trace_id")

    def __init__(self, trace_id: int, span_id: int, *, is_sampled: bool = True) -> None:
        self.trace_id, self.span_id, self.is_sampled = trace_id, span_id, is_sampled

    @property
    def traceparent(self) -> str:
        """The same as W3C trace context."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.is_sampled else '00'}"


class Span(SpanContext):
    """A stretch of time with a name; as a context manager it is the current span of its block."""

    __slots__ = ("_token", "attributes", "end_ns", "name", "parent_id", "start_ns")

    def __init__(
        self, name: str, parent: SpanContext | None, attributes: dict[str, Attribute], start_ns: int, end_ns: int = 0
    ) -> None:
        if parent is None:
            self.trace_id, self.parent_id = _random.getrandbits(128), 0
            self.is_sampled = _samples(self.trace_id)
        else:
            self.trace_id, self.parent_id, self.is_sampled = parent.trace_id, parent.span_id, parent.is_sampled
        self.span_id = _random.getrandbits(64)
        self.name, self.attributes, self.start_ns, self.end_ns = name, attributes, start_ns, end_ns
        self._token: Token[SpanContext | None] | None = None

    def __enter__(self) -> Span:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None, "left before it was entered"
        _current.reset(self._token)
        if kind is not None:
            self.attributes["error.type"] = kind.__name__
        self.end()

    def end(self) -> None:
        """Record it as it ends now, if its trace is sampled."""
        self.end_ns = time.time_ns()
        if self.is_sampled:
            _sink(self)


def _drop(span: Span) -> None:
    """Take a span that ends after recording has ended, or before it begins."""


Sink = Callable[[Span], None]
"""Takes every span when it ends, on whatever thread that happens."""
_sink: Sink = _drop
_samples: Callable[[int], bool] = lambda trace_id: True  # noqa: E731 - replaced by `record_to`
_current: ContextVar[SpanContext | None] = ContextVar("specsplit_span", default=None)
_forwarding: ContextVar[Sequence[SpanContext | None]] = ContextVar("specsplit_forwarding", default=())


def record_to(sink: Sink | None, samples: Callable[[int], bool] = lambda trace_id: True) -> None:
    """Record spans to `sink`, or none at all; called by telemetry.setup only.

    Traces that begin here are recorded if `samples` says so of their id, others if their caller does.
    """
    global _sink, _samples, is_on
    _sink, _samples, is_on = sink or _drop, samples, sink is not None


def current() -> SpanContext | None:
    """Return the caller's span, to be handed to another thread; None if there is none."""
    return _current.get() if is_on else None


def span(name: str, parent: SpanContext | None = None, **attributes: Attribute) -> AbstractContextManager[object]:
    """Record the block as a child of `parent`, by default of the current span."""
    return Span(name, parent or _current.get(), attributes, time.time_ns()) if is_on else _NOTHING


async def around(
    work: Awaitable[T],
    name: str,
    describe: Callable[[T], Mapping[str, Attribute]],
    parent: SpanContext | None = None,
    **attributes: Attribute,
) -> T:
    """Await `work` in a span, which also gets the attributes that `describe` returns for the result."""
    with span(name, parent, **attributes) as begun:
        result = await work
        if isinstance(begun, Span):
            begun.attributes.update(describe(result))
        return result


def inject() -> tuple[tuple[str, str], ...]:
    """Return the caller's span as metadata for another process (W3C); empty while spans are off."""
    found = _current.get() if is_on else None
    return () if found is None else (("traceparent", found.traceparent),)


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> SpanContext | None:
    """Return the span that another process put into `metadata`; None while spans are off or without one.

    A malformed context counts as none.
    """
    if not is_on:
        return None
    # Peers send what they like: bytes, other keys, nonsense. A trace is never worth failing a request.
    sent = next((value for key, value in metadata if key == "traceparent"), "")
    found = _TRACEPARENT.fullmatch(sent) if isinstance(sent, str) else None
    if found is None:
        return None
    trace_id, span_id = int(found[1], 16), int(found[2], 16)
    return SpanContext(trace_id, span_id, is_sampled=bool(int(found[3], 16) & 1)) if trace_id and span_id else None


def forward_for(contexts: Sequence[SpanContext | None]) -> None:
    """Name the spans for which the next forward begun here is, in the order of its sequences."""
    _forwarding.set(contexts)


def forwarded_traces() -> list[str]:
    """Return the W3C trace context of each sequence of the forward that is begun here; empty for one without a span."""
    return [context.traceparent if context is not None else "" for context in _forwarding.get()]


def current_trace_id() -> str:
    """Return the trace of the current span in hexadecimal; empty outside of a span and while spans are off."""
    found = current()
    return "" if found is None else f"{found.trace_id:032x}"


def current_span_id() -> bytes:
    """Return the 8 bytes of the current span's id; empty outside of a span and while spans are off."""
    found = current()
    return b"" if found is None or not found.is_sampled else found.span_id.to_bytes(8, "big")


# A span of a block sets a context variable and resets it in the same context. An async generator may be resumed in
# another one after each yield, where that reset would raise.
class OpenSpan:
    """A span that is never the current one, so it may stay open across the yields of an async generator."""

    def __init__(self, name: str, **attributes: Attribute) -> None:
        # A child of the span in which it is opened, such as that of an HTTP request.
        self.context = Span(name, _current.get(), attributes, time.time_ns()) if is_on else None
        """Parent for the spans inside it; None while spans are off."""

    def end(self, attributes: Mapping[str, Attribute]) -> None:
        """End it with the attributes that only its end shows."""
        if self.context is not None:
            self.context.attributes.update(attributes)
            self.context.end()


def record(name: str, parent: SpanContext | None, start_ns: int, end_ns: int, **attributes: Attribute) -> None:
    """Record a finished span (time.time_ns clock) under `parent`."""
    if is_on and (parent is None or parent.is_sampled):
        _sink(Span(name, parent, attributes, start_ns, end_ns))
