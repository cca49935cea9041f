"""When tokens come: time to the first one, and times between tokens. Pure functions over samples.

Tokens of one round come together. Per token, the wait for them is spread over them evenly; per arrival it counts once,
as a reader of a stream sees it.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.samples import RunSample
from benchmarks.statistics import quantile

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def waits(samples: Iterable[RunSample]) -> list[tuple[float, int]]:
    """Return (seconds, tokens) of every arrival after the first of its sample."""
    found: list[tuple[float, int]] = []
    for sample in samples:
        times = [time_s for time_s, _ in sample.arrivals]
        counts = [count for _, count in sample.arrivals[1:]]
        found.extend(
            (after - before, count) for before, after, count in zip(times, times[1:], counts, strict=False) if count
        )
    return found


def inter_token_s(samples: Iterable[RunSample]) -> dict[str, float] | None:
    """Return the quantiles of the time per token; None where no arrivals were told."""
    return _quantiles([seconds / count for seconds, count in waits(samples) for _ in range(count)])


def inter_arrival_s(samples: Iterable[RunSample]) -> dict[str, float] | None:
    """Return the quantiles of the time between arrivals; None where none were told."""
    return _quantiles([seconds for seconds, _ in waits(samples)])


def ttft_s(samples: Iterable[RunSample]) -> dict[str, float] | None:
    """Return the quantiles of the time to the first token; None where it was not told."""
    return _quantiles([sample.ttft_s for sample in samples if sample.ttft_s is not None])


def _quantiles(values: list[float]) -> dict[str, float] | None:
    return {name: quantile(values, fraction) for name, fraction in QUANTILES.items()} if values else None
