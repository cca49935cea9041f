"""One measured run of a system on a task as it stands in a results file: to JSON and back. Knows no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from benchmarks.systems import Arrivals, Sample
from specsplit.orchestrator.request import RequestTimings, Result, SpeculativeDecoding


@dataclass(frozen=True, slots=True)
class Told:
    """Counts and times of a run that only our own systems tell."""

    mode: str
    timings: RequestTimings
    speculative_decoding: SpeculativeDecoding
    num_rounds: int
    target_forwards: int
    draft_forwards: int
    num_wire_bytes: int | None
    """Both ways, on all links; None in process."""
    degraded: tuple[Mapping[str, Any], ...]
    num_resyncs: int


@dataclass(frozen=True, slots=True)
class RunSample:
    """One system's run on one task in one round."""

    round: int
    system: str
    task: str
    wall_s: float
    num_tokens: int
    """New tokens; a bare forward makes one step less."""
    decode_s: float | None = None
    ttft_s: float | None = None
    token_ids: tuple[int, ...] | None = None
    arrivals: Arrivals = ()
    told: Told | None = None


Rounds = Sequence[Sequence[RunSample]]
"""A system's samples, [rounds][tasks]."""


def to_record(number: int, system: str, task: str, sample: Sample, num_tokens: int) -> dict[str, Any]:
    """Return the JSON line of a sample that made `num_tokens` unless it says itself how many."""
    made = len(sample.token_ids) if sample.token_ids is not None else num_tokens
    return {
        "kind": "sample",
        "round": number,
        "system": system,
        "task": task,
        "wall_s": sample.wall_s,
        "decode_s": sample.decode_s,
        "ttft_s": sample.ttft_s,
        "num_tokens": sample.num_tokens if sample.num_tokens is not None else made,
        "token_ids": list(sample.token_ids) if sample.token_ids is not None else None,
        "arrivals": [[round(time_s, 6), count] for time_s, count in sample.arrivals],
        **(_published(sample.result) if sample.result is not None else {}),
    }


def _published(result: Result) -> dict[str, Any]:
    published = result.to_dict()
    kept = ("mode", "timings", "num_rounds", "target_forwards", "draft_forwards", "degraded", "resyncs", "wire")
    speculative = result.speculative_decoding
    return {
        **{name: published[name] for name in kept if name in published},
        "speculative_decoding": {**speculative.to_dict(), "num_path_tokens": speculative.num_path_tokens},
    }


_LINE = TypeAdapter(RunSample)
"""Fields of a line; it may have more, such as the rates that are derived from its counts."""


def from_record(record: Mapping[str, Any]) -> RunSample:
    """Return the sample that `to_record` wrote.

    Raises:
        KeyError, TypeError, ValueError: it did not.
    """
    if "speculative_decoding" not in record:
        return _LINE.validate_python(record)
    wire = record.get("wire")
    num_bytes = wire["sent_bytes"] + wire["received_bytes"] if wire is not None else None
    told = {**record, "num_wire_bytes": num_bytes, "num_resyncs": len(record["resyncs"])}
    return _LINE.validate_python({**record, "told": told})
