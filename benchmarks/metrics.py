"""Numbers that samples give: rates, waits, the time beside the models, forwards per round, acceptance.

Definitions only; where the numbers go is the report's business. Tokens of one round come together: per token, the wait
for them is spread over them evenly; per arrival it counts once, as a reader of a stream sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise, zip_longest
from statistics import fmean
from typing import Any

from benchmarks.statistics import quantile
from benchmarks.systems import RunSample, Told
from specsplit.orchestrator.request import Result, SpeculativeDecoding

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def overhead_ms(result: Told | Result) -> float:
    """Return the time of a round beside the models' forwards: wall time of decoding minus both, per round."""
    timings = result.timings
    return (timings.decode_s - timings.draft_device_s - timings.target_device_s) * 1e3 / result.num_rounds


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How much of the drafted tokens was accepted, pooled over generations.

    `by_depth[d]` is the fraction of rounds that accepted depth d + 1 among those that reached it (accepted depth d) and
    drafted there; None if there is no such round.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def acceptance(statistics: Iterable[SpeculativeDecoding]) -> Acceptance:
    """Pool the counts of several generations and derive the rates from the sums."""
    columns = zip(*map(astuple, [SpeculativeDecoding(), *statistics]), strict=True)
    pooled = SpeculativeDecoding(*(_summed(column) if column[0] == () else sum(column) for column in columns))
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
    """Return the counts and times that our own systems told of these runs."""
    return [sample.told for sample in samples if sample.told is not None]


def rate(samples: Sequence[RunSample]) -> float:
    """Return the tokens of these runs over the time they took, prompts included."""
    return sum(sample.num_tokens for sample in samples) / sum(sample.wall_s for sample in samples)


def decode_rate(samples: Sequence[RunSample]) -> float | None:
    """Return the tokens after each run's first arrival over the time they took; None if a run did not tell it."""
    decode_s = [sample.decode_s for sample in samples if sample.decode_s is not None]
    if len(decode_s) < len(samples) or not sum(decode_s):
        return None
    return sum(sample.num_decoded for sample in samples) / sum(decode_s)


def wall_s_per_token(sample: RunSample) -> float:
    """Return seconds per new token, the prompt included; so runs of different length can be compared."""
    return sample.wall_s / sample.num_tokens


def decode_s_per_token(sample: RunSample) -> float | None:
    """Return seconds per token after the first arrival; None if there was no other, or it was not told."""
    if sample.decode_s is None or sample.num_decoded < 1:
        return None
    return sample.decode_s / sample.num_decoded


def target_busy_fraction(samples: Iterable[RunSample]) -> float | None:
    """Return how much of the decoding the target computed; None if nothing was told."""
    timings = [told.timings for told in told_of(samples)]
    decode_s = sum(timing.decode_s for timing in timings)
    return sum(timing.target_device_s for timing in timings) / decode_s if decode_s else None


def bytes_per_token(samples: Iterable[RunSample]) -> float | None:
    """Return the bytes that travelled per committed token, both ways; None if nothing travels."""
    pairs = [(sample.told.num_wire_bytes, sample.num_tokens) for sample in samples if sample.told is not None]
    num_bytes = [count for count, _ in pairs if count is not None]
    return sum(num_bytes) / sum(tokens for _, tokens in pairs) if num_bytes else None


def hit_rate(samples: Iterable[RunSample]) -> float | None:
    """Return how many of the rounds drafted ahead had the outcome in the tree; None if none was drafted ahead."""
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


def waits(samples: Iterable[RunSample]) -> list[tuple[float, int]]:
    """Return (seconds, tokens) of every arrival after the first of its sample."""
    pairs = [pair for sample in samples for pair in pairwise(sample.arrivals)]
    return [(after - before, count) for (before, _), (after, count) in pairs if count]


def inter_token_s(samples: Iterable[RunSample]) -> dict[str, float] | None:
    """Return the quantiles of the time per token; None if no arrivals were told."""
    return _quantiles([seconds / count for seconds, count in waits(samples) for _ in range(count)])


def inter_arrival_s(samples: Iterable[RunSample]) -> dict[str, float] | None:
    """Return the quantiles of the time between arrivals; None if none were told."""
    return _quantiles([seconds for seconds, _ in waits(samples)])


def ttft_s(samples: Iterable[RunSample]) -> dict[str, float] | None:
    """Return the quantiles of the time to the first token; None if it was not told."""
    return _quantiles([sample.ttft_s for sample in samples if sample.ttft_s is not None])


def _quantiles(values: list[float]) -> dict[str, float] | None:
    return {name: quantile(values, fraction) for name, fraction in QUANTILES.items()} if values else None


# Spec-Bench's own numbers, defined as its evaluation/speed.py does, so that they can stand beside its tables
# (Xia et al., Unlocking Efficiency in Large Language Model Inference, arXiv 2401.07851).


def mean_accepted_tokens(samples: Iterable[RunSample]) -> float | None:
    """Return the tokens per decoding step of all questions together, bonus token included; None if it was not told.

    Rounds without a tree are steps that gave one token.
    """
    told = told_of(samples)
    num_rounds = sum(each.num_rounds for each in told)
    accepted = sum(each.speculative_decoding.num_accepted_draft_tokens for each in told)
    return 1 + accepted / num_rounds if num_rounds else None


def mean_tokens_per_s(samples: Sequence[RunSample]) -> float:
    """Return the mean over questions of each one's own tokens per second, prompts included."""
    return fmean(sample.num_tokens / sample.wall_s for sample in samples)
