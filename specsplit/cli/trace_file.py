"""Files of spans as requests with their rounds. Knows nothing of how they are drawn.

Each process writes a file of its own; a request's spans are found in all of them by their trace.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specsplit.cli.render import visible
from specsplit.core.errors import InvalidSettings
from specsplit.core.paths import expanded


@dataclass(frozen=True, slots=True)
class Span:
    """One line of a file."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def lane(self) -> str | None:
        """The line on which it is drawn: of the target, of the draft, or of a stage; None for none."""
        if self.name == "stage":
            return f"stage {self.attributes.get('stage', 0)}"
        if self.name == "forward":
            worker = self.attributes.get("worker")
            return str(worker) if worker in ("target", "draft") else None
        return {"verify": "target", "commit": "target", "propose": "draft"}.get(self.name)

    @property
    def is_computing(self) -> bool:
        """Whether somebody computes in it; otherwise somebody waits for an answer."""
        return self.name in ("forward", "stage")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One generation: its span, its rounds in order, and all that has a lane, in the order of their beginnings."""

    span: Span
    request_id: str
    rounds: Sequence[Span]
    parts: Sequence[Span]

    @property
    def lanes(self) -> list[str]:
        """The lanes in which there is something: target, stages, draft."""
        found = {part.lane for part in self.parts} - {None}
        return sorted(map(str, found), key=lambda lane: (lane == "draft", lane != "target", lane))

    def during(self, start_ns: int, end_ns: int) -> Iterator[Span]:
        """Yield the parts that overlap a stretch of time."""
        return (part for part in self.parts if part.start_ns < end_ns and part.end_ns > start_ns)

    def is_called(self, prefix: str) -> bool:
        """Whether the request's id, its session or its trace begins so."""
        names = (self.request_id, str(self.span.attributes.get("session", "")), self.span.trace_id)
        return any(name.startswith(prefix) for name in names)


def read_spans(paths: Iterable[Path]) -> list[Span]:
    """Return the spans of all files.

    Raises:
        InvalidSettings: a file cannot be read, or holds something else.
    """
    spans: list[Span] = []
    for path in paths:
        try:
            lines = expanded(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise InvalidSettings(f"The trace file {path} cannot be read ({reason}); name one of --trace.") from error
        for number, line in enumerate(lines, 1):
            try:
                spans.append(_span(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                # A process that was killed may leave half a line at the end.
                if number == len(lines):
                    break
                message = f"Line {number} of {path} is no span; name a file that --trace has written."
                raise InvalidSettings(message) from error
    return spans


def _span(line: dict[str, Any]) -> Span:
    names = ("name", "trace_id", "span_id", "parent_id", "start_ns", "end_ns", "attributes")
    values: dict[str, Any] = {name: line[name] for name in names}
    if not (isinstance(values["start_ns"], int) and isinstance(values["end_ns"], int)):
        raise TypeError("times are integers")
    values["attributes"] = dict(values["attributes"])
    return Span(**values)


def requests_in(spans: Sequence[Span]) -> list[TracedRequest]:
    """Return the requests that have a round, in the order of their beginnings."""
    children: dict[str, list[Span]] = {}
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        if span.parent_id is not None:
            children.setdefault(span.parent_id, []).append(span)
    found = [_request(span, children, by_id) for span in spans if span.name == "request"]
    return sorted((each for each in found if each.rounds), key=lambda each: each.span.start_ns)


def _request(span: Span, children: dict[str, list[Span]], by_id: dict[str, Span]) -> TracedRequest:
    below: list[Span] = []
    waiting = [span.span_id]
    while waiting:
        own = children.get(waiting.pop(), [])
        below += own
        waiting += [child.span_id for child in own]
    http = by_id.get(span.parent_id or "")
    rounds = sorted((each for each in below if each.name == "round"), key=lambda each: each.start_ns)
    parts = sorted((each for each in below if each.lane is not None), key=lambda each: each.start_ns)
    return TracedRequest(span, str(http.attributes.get("request", "")) if http is not None else "", rounds, parts)


def covered_ns(parts: Iterable[Span], start_ns: int, end_ns: int) -> int:
    """Return how much of a stretch of time the parts cover together."""
    edges: list[tuple[int, int]] = sorted((max(part.start_ns, start_ns), min(part.end_ns, end_ns)) for part in parts)
    total, reached = 0, start_ns
    for begin, end in edges[bisect_left(edges, (start_ns, start_ns)) :]:
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def title(request: TracedRequest) -> str:
    """Return the line that names a request."""
    attributes = request.span.attributes
    model, tokens = attributes.get("gen_ai.request.model", "?"), attributes.get("gen_ai.usage.output_tokens", "?")
    named = f"request {request.request_id}" if request.request_id else f"session {attributes.get('session', '?')}"
    total_ms = (request.rounds[-1].end_ns - request.rounds[0].start_ns) / 1e6
    return visible(f"{named}: {model}, {tokens} tokens in {len(request.rounds)} rounds, {total_ms:.1f} ms")


def shares(request: TracedRequest) -> list[tuple[str, float | None, float]]:
    """Return for each lane the share of the rounds' time in which it computed, and in which it was waited for.

    A lane that is known only from those who waited for it has None for the first: its own file is missing.
    """
    start_ns, end_ns = request.rounds[0].start_ns, request.rounds[-1].end_ns
    whole = max(1, end_ns - start_ns)
    found: list[tuple[str, float | None, float]] = []
    for lane in request.lanes:
        parts = [part for part in request.parts if part.lane == lane]
        forwards = [part for part in parts if part.is_computing]
        computed = covered_ns(forwards, start_ns, end_ns)
        waited = (covered_ns(parts, start_ns, end_ns) - computed) / whole
        found.append((lane, computed / whole if forwards else None, waited))
    return found
