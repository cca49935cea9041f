"""Numbers of a load: tokens and requests per second, goodput, waits, refusals. Definitions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.load.clients import Outcome
from benchmarks.load.settings import Limits
from benchmarks.statistics import estimate, quantile

QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
Record = dict[str, Any]
Rounds = Sequence[Sequence[Outcome]]


def is_good(outcome: Outcome, limits: Limits) -> bool:
    """Return whether the request was done within both limits."""
    ttft_s, itl_s = outcome.ttft_s, outcome.itl_s
    if not outcome.is_done or ttft_s is None:
        return False
    return ttft_s <= limits.ttft_s and (itl_s is None or itl_s <= limits.itl_s)


def rates(outcomes: Sequence[Outcome], limits: Limits) -> dict[str, float]:
    """Return the rates of one load, from the first request's due time to the last one's end; 0 if it had none."""
    ends_s = [each.due_s + each.e2e_s for each in outcomes]
    span_s = max(ends_s) - min(each.due_s for each in outcomes) if outcomes else 1.0
    done = [each for each in outcomes if each.is_done]
    good = [each for each in done if is_good(each, limits)]
    return {
        "tokens_per_s": sum(each.num_tokens for each in done) / span_s,
        "requests_per_s": len(done) / span_s,
        "goodput_tokens_per_s": sum(each.num_tokens for each in good) / span_s,
        "goodput_requests_per_s": len(good) / span_s,
        # A request that was refused at first and done later is one request.
        "good_share": len(good) / max(1, len({each.number for each in outcomes})),
        "refused_share": sum(each.retry_after_s is not None for each in outcomes) / max(1, len(outcomes)),
    }


def summarise(rounds: Rounds, limits: Limits) -> Record:
    """Return the figures of a system at a point: rates by round, waits of all rounds together."""
    by_round = [rates(each, limits) for each in rounds]
    everything = [each for outcomes in rounds for each in outcomes]
    done = [each for each in everything if each.is_done]
    pairs = [pair for each in done for pair in pairwise(each.arrivals)]
    return {
        **{name: estimate([each[name] for each in by_round]).to_dict() for name in by_round[0]},
        "ttft_s": _quantiles([each.ttft_s for each in done if each.ttft_s is not None]),
        # Tokens that came together waited alike: each for its part of the time.
        "itl_s": _quantiles([(after - before) / n for (before, _), (after, n) in pairs if n for _ in range(n)]),
        "e2e_s": _quantiles([each.e2e_s for each in done]),
        "refused_s": _quantiles([each.e2e_s for each in everything if each.retry_after_s is not None]),
        "num_done": len(done),
        "num_refused": sum(each.retry_after_s is not None for each in everything),
        "num_failed": sum(each.error is not None for each in everything),
        "errors": sorted({each.error for each in everything if each.error is not None})[:3],
    }


def ratio(system: Record, baseline: Record, name: str = "tokens_per_s") -> Record | None:
    """Return a rate over another one of the same rounds, round by round; None if the other one is 0 in all of them."""
    pairs = zip(system[name]["samples"], baseline[name]["samples"], strict=True)
    ratios = [value / base for value, base in pairs if base]
    return estimate(ratios).to_dict() if ratios else None


def differing_texts(rounds: Rounds, reference: Mapping[int, tuple[int, ...]]) -> dict[str, int]:
    """Return how many texts were compared with the reference's by task number, and how many differ."""
    told = [each for row in rounds for each in row if each.token_ids is not None and each.number in reference]
    different = sum(each.token_ids != reference[each.number] for each in told)
    return {"num_compared": len(told), "num_different": different}


def _quantiles(values: list[float]) -> dict[str, float] | None:
    return {name: quantile(values, fraction) for name, fraction in QUANTILES.items()} if values else None


def raw(outcome: Outcome) -> list[Any]:
    """Return a request as a results file holds it: number, due_s, ttft_s, e2e_s, tokens, and how it ended."""
    end = "done" if outcome.is_done else "failed" if outcome.error is not None else "refused"
    times = (outcome.due_s, outcome.ttft_s, outcome.e2e_s)
    return [outcome.number, *(None if each is None else round(each, 4) for each in times), outcome.num_tokens, end]
