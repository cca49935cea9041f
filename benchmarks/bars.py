"""The bars that a run in one process can check: P1, P2, P3, P4, P9; each a number, its spread and its bound.

Definitions only; samples come in by the names of the systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.metrics import forwards_per_round, overhead_ms, tokens_per_s
from benchmarks.statistics import Estimate, estimate, median, paired_speedup, quantile
from benchmarks.systems import Sample
from specsplit.orchestrator.request import Result

PINGPONG_REMOTE = "pingpong, loopback"
PLAIN, PINGPONG, AUTO, BARE, GENERATE = "plain", "pingpong", "auto", "bare forward", "transformers generate"
ASSISTED_PREFIX, LOOKUP_PREFIX = "transformers assisted", "transformers prompt lookup"
"""The names by which the adapters under `peers/` call their systems."""

Samples = dict[str, list[list[Sample]]]
"""[rounds][tasks] by system."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of docs/performance.md: `value` is to be at least, at most or exactly `bound`."""

    id: str
    measure: str
    value: Estimate
    relation: Literal[">=", "<=", "=="]
    bound: float
    note: str = ""

    @property
    def is_met(self) -> bool:
        value = self.value.median
        if self.relation == ">=":
            return value >= self.bound
        if self.relation == "<=":
            return value <= self.bound
        return all(sample == self.bound for sample in self.value.samples)

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types."""
        return {
            "id": self.id,
            "measure": self.measure,
            "value": self.value.to_dict(),
            "relation": self.relation,
            "bound": self.bound,
            "is_met": self.is_met,
            "note": self.note,
        }


def rates(samples: Samples, num_tokens: int) -> dict[str, list[float]]:
    """Return each system's tokens per second, one per round; a bare forward's prompt is not in it."""
    return {
        name: tokens_per_s(rounds, num_tokens - 1 if name == BARE else num_tokens) for name, rounds in samples.items()
    }


def better_of(by_system: dict[str, list[float]], prefix: str) -> str:
    """Return the name of the fastest variant of a peer."""
    variants = [name for name in by_system if name.startswith(prefix)]
    return max(variants, key=lambda name: median(by_system[name]))


def wall_times(rounds: Sequence[Sequence[Sample]]) -> list[list[float]]:
    """Return seconds, [rounds][tasks]."""
    return [[sample.wall_s for sample in samples] for samples in rounds]


def results(rounds: Sequence[Sequence[Sample]]) -> list[Result]:
    """Return what our own systems told, all rounds in a row."""
    return [sample.result for samples in rounds for sample in samples if sample.result is not None]


def check_bars(
    samples: Samples, num_tokens: int, prefill_chunk_tokens: int, wire_bytes: dict[str, float] | None = None
) -> list[Bar]:
    """Return every bar that can be checked on these samples; `wire_bytes` are a round's, by link and direction."""

    def ratio(system: str, baseline: str) -> Estimate:
        return paired_speedup(wall_times(samples[baseline]), wall_times(samples[system]))

    by_system = rates(samples, num_tokens)
    ours = AUTO if AUTO in samples else PINGPONG
    assisted, lookup = better_of(by_system, ASSISTED_PREFIX), better_of(by_system, LOOKUP_PREFIX)
    plain_decode_s = [[sample.decode_s or sample.wall_s for sample in row] for row in samples[PLAIN]]
    plain_over_bare = paired_speedup(wall_times(samples[BARE]), plain_decode_s)
    forwards = forwards_per_round(results(samples[PINGPONG]), prefill_chunk_tokens)
    return [
        Bar("P1", "plain / transformers generate", ratio(PLAIN, GENERATE), ">=", 1.1),
        Bar("P1", "plain / bare forward", plain_over_bare, ">=", 0.93, "the bar of deeper targets"),
        Bar("P2", f"{ours} / plain", ratio(ours, PLAIN), ">=", 1.8),
        Bar("P3", f"{ours} / {assisted}", ratio(ours, assisted), ">=", 1.5, "the better one"),
        Bar("P3", f"{ours} / {lookup}", ratio(ours, lookup), ">=", 1.15, "the better one"),
        _overhead_bar("ms a round beside the forwards", samples[PINGPONG], 1.0),
        *_loopback_bars(samples, wire_bytes),
        Bar("P9", "target forwards a round", estimate(forwards), "==", 1, "the prompt's left out"),
    ]


def _overhead_bar(measure: str, rounds: Sequence[Sequence[Sample]], bound: float) -> Bar:
    overheads = [[overhead_ms(result) for result in results([row])] for row in rounds]
    p95 = quantile([value for row in overheads for value in row], 0.95)
    return Bar("P4", measure, _medians(overheads), "<=", bound, f"p95 {p95:.2f} over generations")


def _loopback_bars(samples: Samples, wire_bytes: dict[str, float] | None) -> list[Bar]:
    if PINGPONG_REMOTE not in samples:
        return []
    found = [_overhead_bar("the same, workers on loopback", samples[PINGPONG_REMOTE], 2.0)]
    for link, value in (wire_bytes or {}).items():
        found.append(Bar("P8", f"bytes a round, {link}", estimate([value]), "<=", 400, "32 nodes; all TCP payload"))
    return found


def _medians(rows: Sequence[Sequence[float]]) -> Estimate:
    return estimate([median(row) for row in rows])
