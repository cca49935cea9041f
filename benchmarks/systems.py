"""The things that are measured: tasks, the systems that do them, and one system's run on one task, in JSON and back.

Knows no model, no file and no system's library; the adapters under `peers/` implement System.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import TypeAdapter

from specsplit.core.types import SamplingParams
from specsplit.orchestrator.request import RequestTimings, Result, SpeculativeDecoding

Arrivals = tuple[tuple[float, int], ...]
"""(seconds since the start, new tokens) of everything that a reader would have seen arrive, in order."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to be continued by exactly `num_tokens` tokens, end-of-sequence tokens being tokens like any other."""

    id: str
    prompt_ids: tuple[int, ...]
    num_tokens: int
    sampling: SamplingParams = field(default=SamplingParams())
    seed: int = 0
    text: str | None = None
    """The text that `prompt_ids` encode, if it was one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One system's run on one task, the model loaded and the prompt encoded beforehand."""

    wall_s: float
    """From the prompt's ids to the last new token; for a bare forward, its decoding steps only."""
    token_ids: tuple[int, ...] | None
    """The new tokens; None where the system generates none, or does not tell them."""
    decode_s: float | None = None
    """From the first to the last new token, where the system tells."""
    result: Result | None = None
    """All that our own systems tell."""
    arrivals: Arrivals = ()
    """Empty where the system does not tell."""
    num_tokens: int | None = None
    """New tokens, where `token_ids` does not tell or they are not the task's number."""

    @property
    def ttft_s(self) -> float | None:
        """Return the time to the first token, None where it is not known."""
        if self.result is not None:
            return self.result.timings.ttft_s
        return self.arrivals[0][0] if self.arrivals else None


class System(Protocol):
    """Something that continues prompts, loaded and ready."""

    @property
    def name(self) -> str: ...

    def generate(self, task: Task) -> Sample:
        """Do the task and time it."""
        ...


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

    @property
    def num_decoded(self) -> int:
        """Return the tokens behind those that came first, which `decode_s` brought."""
        return self.num_tokens - (self.arrivals[0][1] if self.arrivals else 1)


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
