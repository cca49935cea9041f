"""Trace files (`--trace-file`) as intervals of lanes: who computed when, what travelled, who waited.

Knows spans by their published names only. Files of workers on the same machine join the orchestrator's by trace id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.statistics import median
from specsplit.core.errors import InvalidRequest

Interval = tuple[float, float]
"""(start, end) in milliseconds since the trace's first round."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One generation, after its prompt was taken in."""

    rounds: list[Interval]
    verify: list[Interval]
    """Forwards of the target."""
    draft: list[Interval]
    """Forwards of the draft."""
    to_target: list[Interval]
    """Within a verify, while the target computed nothing: travel, queues, hand-over."""
    to_draft: list[Interval]
    """The same of a propose and the draft."""

    @property
    def span_ms(self) -> float:
        return self.rounds[-1][1] - self.rounds[0][0]

    def idle(self, lane: Sequence[Interval]) -> list[Interval]:
        """Return when nothing of a lane happened."""
        return minus([(self.rounds[0][0], self.rounds[-1][1])], lane)

    def shares(self) -> dict[str, float]:
        """Return what part of the time each lane was busy, both models at once, or nothing of them at all."""
        both = overlap(self.verify, self.draft)
        any_model, waits = union([*self.verify, *self.draft]), union([*self.to_target, *self.to_draft])
        parts = {
            "verify": total(self.verify),
            "draft": total(self.draft),
            "both at once": total(both),
            "engines and hand-over": total(minus(waits, any_model)),
            "python between": total(minus(self.idle(any_model), waits)),
        }
        return {name: value / self.span_ms for name, value in parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the number of rounds, their median length and the shares."""
        lengths = [end - start for start, end in self.rounds]
        return {"num_rounds": len(self.rounds), "round_ms": median(lengths), "shares": self.shares()}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals joined where they touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def minus(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """Return what of the intervals lies in none of the holes."""
    found: list[Interval] = []
    closed = union(holes)
    for start, end in union(intervals):
        at = start
        for hole_start, hole_end in closed:
            if hole_end <= at or hole_start >= end:
                continue
            if hole_start > at:
                found.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            found.append((at, end))
    return found


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return when both happened."""
    return minus(first, minus(first, second))


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of all intervals together, what lies in two of them counted once."""
    return sum(end - start for start, end in union(intervals))


def is_trace(line: Mapping[str, Any]) -> bool:
    """Return whether a JSON line is a span."""
    return {"name", "trace_id", "span_id", "start_ns", "end_ns"} <= line.keys()


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the spans of all files.

    Raises:
        InvalidRequest: a file cannot be read, or holds something else.
    """
    spans: list[dict[str, Any]] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            found = [json.loads(line) for line in lines]
        except OSError as error:
            raise InvalidRequest(f"The trace file {path} cannot be read ({error.strerror}).", param="file") from error
        except ValueError as error:
            raise InvalidRequest(f"{path} is no trace file of `specsplit orchestrate`.", param="file") from error
        if not all(isinstance(each, dict) and is_trace(each) for each in found):
            raise InvalidRequest(f"{path} is no trace file of `specsplit orchestrate`.", param="file")
        spans += found
    return spans


def timeline(spans: Sequence[Mapping[str, Any]]) -> Timeline | None:
    """Return the first request's rounds after its first one, which takes in the prompt; None where there are none."""
    requests = [span for span in spans if span["name"] == "request"]
    if not requests:
        return None
    mine = [span for span in spans if span["trace_id"] == requests[0]["trace_id"]]
    rounds = sorted((each for each in mine if each["name"] == "round"), key=lambda each: each["start_ns"])[1:]
    if not rounds:
        return None
    first_ns, last_ns = rounds[0]["start_ns"], max(each["end_ns"] for each in rounds)

    def shown(span: Mapping[str, Any]) -> Interval:
        start_ns, end_ns = max(first_ns, span["start_ns"]), min(last_ns, span["end_ns"])
        return (start_ns - first_ns) / 1e6, (end_ns - first_ns) / 1e6

    inside = [span for span in mine if span["end_ns"] > first_ns and span["start_ns"] < last_ns]
    forwards = [span for span in inside if span["name"] == "forward"]
    lanes = {
        worker: union(shown(span) for span in forwards if span["attributes"].get("worker") == worker)
        for worker in ("target", "draft")
    }
    to_target, to_draft = (
        minus((shown(span) for span in inside if span["name"] == name), lanes[worker])
        for name, worker in (("verify", "target"), ("propose", "draft"))
    )
    return Timeline([shown(each) for each in rounds], lanes["target"], lanes["draft"], to_target, to_draft)
