"""What samples say: rates, the time around the models, forwards per round, acceptance.

Definitions only; where the numbers go is the report's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from benchmarks.samples import RunSample, Told
from benchmarks.systems import Sample
from specsplit.orchestrator.request import RequestTimings, Result, SpeculativeDecoding


class Timed(Protocol):
    """A run whose time is told by its parts: a Result, or what a results file kept of one."""

    @property
    def timings(self) -> RequestTimings: ...

    @property
    def num_rounds(self) -> int: ...


def tokens_per_s(rounds: Sequence[Sequence[Sample]], num_tokens: int) -> list[float]:
    """Return, per round, the new tokens of all tasks over the time that all took, prompts included."""
    return [num_tokens * len(samples) / sum(sample.wall_s for sample in samples) for samples in rounds]


def decode_tokens_per_s(rounds: Sequence[Sequence[Sample]], num_tokens: int) -> list[float] | None:
    """Return, per round, the tokens after each task's first over the time they took; None where that was not told."""
    rates: list[float] = []
    for samples in rounds:
        decode_s = [sample.decode_s for sample in samples if sample.decode_s is not None]
        if len(decode_s) < len(samples):
            return None
        rates.append((num_tokens - 1) * len(samples) / sum(decode_s))
    return rates


def overhead_ms(result: Timed) -> float:
    """Return what a round takes beside the models' forwards: wall time of decoding minus both, per round."""
    timings = result.timings
    return (timings.decode_s - timings.draft_device_s - timings.target_device_s) * 1e3 / result.num_rounds


def decode_forwards(result: Result, chunk_tokens: int) -> int:
    """Return the target forwards after the prompt's; a prompt takes one per `chunk_tokens` begun."""
    return result.target_forwards - -(-len(result.prompt_token_ids) // chunk_tokens)


def forwards_per_round(results: Iterable[Result], chunk_tokens: int) -> list[float]:
    """Return each generation's target forwards per round, the prompt's left out."""
    return [decode_forwards(result, chunk_tokens) / result.num_rounds for result in results]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How much of what was drafted was accepted, pooled over generations.

    `by_depth[d]` is the fraction of rounds that accepted depth d + 1 among those that reached it (accepted depth d) and
    drafted there; None where there is no such round.
    """

    num_rounds: int
    mean_acceptance_length: float
    path_acceptance_rate: float
    node_acceptance_rate: float
    by_depth: tuple[float | None, ...]
    tested_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    histogram: tuple[int, ...]
    """Entry k counts rounds that accepted k nodes."""

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types."""
        return {
            "num_rounds": self.num_rounds,
            "mean_acceptance_length": self.mean_acceptance_length,
            "path_acceptance_rate": self.path_acceptance_rate,
            "node_acceptance_rate": self.node_acceptance_rate,
            "by_depth": list(self.by_depth),
            "tested_by_depth": list(self.tested_by_depth),
            "accepted_by_depth": list(self.accepted_by_depth),
            "histogram": list(self.histogram),
        }


def acceptance(statistics: Iterable[SpeculativeDecoding]) -> Acceptance:
    """Pool the counts of several generations and derive the rates from the sums."""
    parts = list(statistics)
    pooled = SpeculativeDecoding(
        num_spec_steps=sum(part.num_spec_steps for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_path_tokens=sum(part.num_path_tokens for part in parts),
        num_accepted_draft_tokens=sum(part.num_accepted_draft_tokens for part in parts),
        acceptance_histogram=_summed(part.acceptance_histogram for part in parts),
        tested_by_depth=_summed(part.tested_by_depth for part in parts),
        accepted_by_depth=_summed(part.accepted_by_depth for part in parts),
    )
    pairs = zip(pooled.accepted_by_depth, pooled.tested_by_depth, strict=True)
    return Acceptance(
        num_rounds=pooled.num_spec_steps,
        mean_acceptance_length=pooled.mean_acceptance_length,
        path_acceptance_rate=pooled.draft_acceptance_rate,
        node_acceptance_rate=pooled.node_acceptance_rate,
        by_depth=tuple(accepted / tested if tested else None for accepted, tested in pairs),
        tested_by_depth=pooled.tested_by_depth,
        accepted_by_depth=pooled.accepted_by_depth,
        histogram=pooled.acceptance_histogram,
    )


def _summed(columns: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*columns, fillvalue=0)))


def told_of(samples: Iterable[RunSample]) -> list[Told]:
    """Return what our own systems told of these runs."""
    return [sample.told for sample in samples if sample.told is not None]


def rate(samples: Sequence[RunSample]) -> float:
    """Return the tokens of these runs over the time they took, prompts included."""
    return sum(sample.num_tokens for sample in samples) / sum(sample.wall_s for sample in samples)


def decode_rate(samples: Sequence[RunSample]) -> float | None:
    """Return the tokens after each run's first over the time that they took; None where that was not told."""
    decode_s = [sample.decode_s for sample in samples if sample.decode_s is not None]
    if len(decode_s) < len(samples) or not sum(decode_s):
        return None
    return sum(sample.num_tokens - 1 for sample in samples) / sum(decode_s)


def target_busy_fraction(samples: Iterable[RunSample]) -> float | None:
    """Return how much of the decoding the target computed; None where nothing was told."""
    timings = [told.timings for told in told_of(samples)]
    decode_s = sum(timing.decode_s for timing in timings)
    return sum(timing.target_device_s for timing in timings) / decode_s if decode_s else None


def bytes_per_token(samples: Iterable[RunSample]) -> float | None:
    """Return the bytes that travelled per committed token, both ways; None where nothing travels."""
    pairs = [(sample.told.num_wire_bytes, sample.num_tokens) for sample in samples if sample.told is not None]
    num_bytes = [count for count, _ in pairs if count is not None]
    return sum(num_bytes) / sum(tokens for _, tokens in pairs) if num_bytes else None


def hit_rate(samples: Iterable[RunSample]) -> float | None:
    """Return how many of the rounds drafted ahead had the outcome in the tree; None where none was drafted ahead."""
    counts = [told.speculative_decoding for told in told_of(samples)]
    num_ahead = sum(count.num_ahead_rounds for count in counts)
    return sum(count.num_kept_rounds for count in counts) / num_ahead if num_ahead else None


def kept_share(samples: Iterable[RunSample]) -> float:
    """Return the fraction of all rounds whose outcome was already drafted when the verdict came: h of the limits."""
    told = told_of(samples)
    num_rounds = sum(each.num_rounds for each in told)
    return sum(each.speculative_decoding.num_kept_rounds for each in told) / num_rounds if num_rounds else 0.0


def tokens_per_round(samples: Iterable[RunSample]) -> float | None:
    """Return the tokens committed per round after the prompt's, rounds without a tree included."""
    told = [sample for sample in samples if sample.told is not None]
    num_rounds = sum(each.num_rounds for each in told_of(told))
    return sum(sample.num_tokens - 1 for sample in told) / num_rounds if num_rounds else None
