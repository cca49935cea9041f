"""One measured run of a system on a task as it stands in a results file: to JSON and back. Knows no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.systems import Arrivals, Sample
from specsplit.orchestrator.request import RequestTimings, Result, SpeculativeDecoding


@dataclass(frozen=True, slots=True)
class Told:
    """What only our own systems tell of a run."""

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


def to_record(number: int, system: str, task: str, sample: Sample, num_tokens: int) -> dict[str, object]:
    """Return the JSON line of a sample that made `num_tokens` where it does not say itself how many."""
    made = len(sample.token_ids) if sample.token_ids is not None else num_tokens
    record: dict[str, object] = {
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
    }
    return record if sample.result is None else {**record, **_told(sample.result)}


def _told(result: Result) -> dict[str, object]:
    published = result.to_dict()
    kept = ("mode", "timings", "num_rounds", "target_forwards", "draft_forwards", "degraded", "resyncs", "wire")
    speculative = result.speculative_decoding
    return {
        **{name: published[name] for name in kept if name in published},
        "speculative_decoding": {**speculative.to_dict(), "num_path_tokens": speculative.num_path_tokens},
    }


def from_record(record: Mapping[str, Any]) -> RunSample:
    """Return what `to_record` wrote.

    Raises:
        KeyError, TypeError, ValueError: it did not.
    """
    token_ids = record["token_ids"]
    return RunSample(
        round=int(record["round"]),
        system=str(record["system"]),
        task=str(record["task"]),
        wall_s=float(record["wall_s"]),
        num_tokens=int(record["num_tokens"]),
        decode_s=record["decode_s"],
        ttft_s=record["ttft_s"],
        token_ids=tuple(token_ids) if token_ids is not None else None,
        arrivals=tuple((float(time_s), int(count)) for time_s, count in record["arrivals"]),
        told=_from_told(record) if "speculative_decoding" in record else None,
    )


def _from_told(record: Mapping[str, Any]) -> Told:
    counts, timings, wire = record["speculative_decoding"], record["timings"], record.get("wire")
    return Told(
        mode=record["mode"],
        timings=RequestTimings(**timings),
        speculative_decoding=SpeculativeDecoding(
            num_spec_steps=counts["num_spec_steps"],
            num_draft_tokens=counts["num_draft_tokens"],
            num_path_tokens=counts["num_path_tokens"],
            num_accepted_draft_tokens=counts["num_accepted_draft_tokens"],
            acceptance_histogram=tuple(counts["acceptance_histogram"]),
            tested_by_depth=tuple(counts["tested_by_depth"]),
            accepted_by_depth=tuple(counts["accepted_by_depth"]),
            num_ahead_rounds=counts["num_ahead_rounds"],
            num_kept_rounds=counts["num_kept_rounds"],
        ),
        num_rounds=record["num_rounds"],
        target_forwards=record["target_forwards"],
        draft_forwards=record["draft_forwards"],
        num_wire_bytes=wire["sent_bytes"] + wire["received_bytes"] if wire is not None else None,
        degraded=tuple(record["degraded"]),
        num_resyncs=len(record["resyncs"]),
    )


Rounds = Sequence[Sequence[RunSample]]
"""A system's samples, [rounds][tasks]."""
