"""Every number of docs/performance.md for a run, per system, per task and pooled; pure functions over samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import metrics
from benchmarks.agreement import first_difference
from benchmarks.limits import Costs, Inputs, reached
from benchmarks.metrics import decode_s_per_token, wall_s_per_token
from benchmarks.registry import BARE, GENERATE, PLAIN
from benchmarks.results_file import Run
from benchmarks.statistics import estimate, median, paired_speedup, quantile
from benchmarks.systems import Rounds, RunSample, Told

Record = dict[str, Any]
Seconds = Callable[[RunSample], float | None]
_STREAMING = ("stream", "auto")
"""The modes whose rounds may be streamed."""


def reservations(name: str, facts: Mapping[str, Any]) -> list[str]:
    """Return what a reader has to know of a server that cannot be asked for just what the others do."""
    told: list[str] = []
    if not facts.get("takes_token_ids", True):
        told.append(f"{name} takes no token ids: it gets the text, and may tokenize it in another way.")
    if not facts.get("goes_past_eos", True):
        told.append(f"{name} takes no fields beyond the protocol: it may stop before it has written all tokens.")
    return told


def reference_of(systems: Sequence[str]) -> str | None:
    """Return whose text is the truth: plain decoding's wherever it runs, else transformers'."""
    plain = [name for name in systems if name.partition("@")[0] == PLAIN]
    return next(iter([*plain, *(name for name in systems if name == GENERATE)]), None)


def comparable_texts(header: Record) -> frozenset[str]:
    """Return the systems whose text must be the reference's: with a temperature, those that share our noise."""
    is_greedy = header["settings"]["temperature"] == 0
    return frozenset(name for name, system in header["systems"].items() if is_greedy or system["mode"] is not None)


def num_compared(run: Run) -> int:
    """Return how many texts of other systems can be compared with the reference's."""
    reference, comparable = reference_of(list(run.samples)), comparable_texts(run.header)
    rows = [row for name in run.samples if name in comparable and name != reference for row in run.samples[name]]
    return sum(sample.token_ids is not None for row in rows for sample in row) if reference is not None else 0


def summarise(run: Run) -> Record:
    """Return a summary by system; `run` has at least one whole round."""
    return {name: _system(run, name) for name in run.samples}


def _system(run: Run, name: str) -> Record:
    rounds = run.samples[name]
    places = range(len(rounds[0]))
    limits = limits_of(rounds, run.costs[name], run.header["systems"][name]["mode"]) if name in run.costs else None
    return {
        "pooled": _block(run, name, places),
        "categories": {category: _block(run, name, chosen) for category, chosen in run.categories.items()},
        "limits": limits,
        "num_degraded": sum(bool(told.degraded) for samples in rounds for told in metrics.told_of(samples)),
        "num_resyncs": sum(told.num_resyncs for samples in rounds for told in metrics.told_of(samples)),
    }


def _chosen(rounds: Rounds, places: Sequence[int]) -> list[list[RunSample]]:
    return [[samples[place] for place in places] for samples in rounds]


def _block(run: Run, name: str, places: Sequence[int]) -> Record:
    """Return the numbers of one system on some of the tasks."""
    rounds = _chosen(run.samples[name], places)
    flat = [sample for samples in rounds for sample in samples]
    is_decoding_only = name == BARE  # a bare forward takes in no prompt
    decode = [value for samples in rounds if (value := metrics.decode_rate(samples)) is not None]
    told = metrics.told_of(flat)
    found: Record = {
        "num_tasks": len(places),
        "tokens_per_s": None if is_decoding_only else estimate([metrics.rate(row) for row in rounds]).to_dict(),
        "decode_tokens_per_s": estimate(decode).to_dict() if len(decode) == len(rounds) else None,
        "speedup": {} if is_decoding_only else _speedups(run, name, places, wall_s_per_token, (PLAIN, GENERATE)),
        "decode_speedup": _speedups(run, name, places, decode_s_per_token, (PLAIN, GENERATE, BARE)),
        "ttft_s": metrics.ttft_s(flat),
        "inter_token_s": metrics.inter_token_s(flat),
        "inter_arrival_s": metrics.inter_arrival_s(flat),
        "agreement": _agreement(run, name, places),
    }
    if told:
        overheads = [metrics.overhead_ms(each) for each in told if each.num_rounds]
        found |= {
            "tokens_per_round": metrics.tokens_per_round(flat),
            "acceptance": metrics.acceptance(each.speculative_decoding for each in told).to_dict(),
            "target_busy_fraction": metrics.target_busy_fraction(flat),
            "bytes_per_token": metrics.bytes_per_token(flat),
            "overhead_ms": {"median": median(overheads), "p95": quantile(overheads, 0.95)} if overheads else None,
        }
        hits = metrics.hit_rate(flat)
        if hits is not None:
            found["hit_rate"] = hits
    if not is_decoding_only:
        found["spec_bench"] = _spec_bench(run, name, places)
    return found


def _speedups(run: Run, name: str, places: Sequence[int], seconds: Seconds, baselines: Sequence[str]) -> Record:
    """Return how many times faster the system is than each baseline that was measured beside it.

    Plain decoding at the system's own place comes before plain decoding elsewhere.
    """
    place = name.partition("@")[2]
    own_plain = f"{PLAIN}@{place}" if place else PLAIN
    found: Record = {}
    for baseline in dict.fromkeys([own_plain, *baselines]):
        if baseline == name or baseline not in run.samples:
            continue
        before, after = (_rows(run.samples[each], places, seconds) for each in (baseline, name))
        if before is not None and after is not None:
            found[baseline] = paired_speedup(before, after).to_dict()
    return found


def _rows(rounds: Rounds, places: Sequence[int], seconds: Seconds) -> list[list[float]] | None:
    """Return seconds, [rounds][tasks]; None where one is not known."""
    rows = [[seconds(sample) for sample in samples] for samples in _chosen(rounds, places)]
    known = [[value for value in row if value is not None] for row in rows]
    return known if all(len(row) == len(places) for row in known) else None


def _spec_bench(run: Run, name: str, places: Sequence[int]) -> Record:
    rounds = _chosen(run.samples[name], places)
    found: Record = {
        "mean_accepted_tokens": metrics.mean_accepted_tokens([each for row in rounds for each in row]),
        "mean_tokens_per_s": estimate([metrics.mean_tokens_per_s(row) for row in rounds]).to_dict(),
    }
    if PLAIN in run.samples and name != PLAIN:
        baselines = _chosen(run.samples[PLAIN], places)
        # A ratio of means: a question that is fast weighs more than in a ratio of summed times.
        means = [[metrics.mean_tokens_per_s(row) for row in rows] for rows in (rounds, baselines)]
        ratios = [after / before for after, before in zip(*means, strict=True)]
        found["speedup"] = estimate(ratios).to_dict()
    return found


def _agreement(run: Run, name: str, places: Sequence[int]) -> Record | None:
    """Return how much of the reference's text the system wrote; None where it need not have."""
    reference = reference_of(list(run.samples))
    if reference is None or name not in comparable_texts(run.header):
        return None
    wanted = [run.samples[reference][0][place].token_ids for place in places]
    got = [[sample.token_ids for sample in row] for row in _chosen(run.samples[name], places)]
    pairs = [(a, b) for row in got for a, b in zip(wanted, row, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    forks = [first_difference(a, b) for a, b in pairs]
    same = sum(len(a) if fork is None else fork for fork, (a, _) in zip(forks, pairs, strict=True))
    return {
        "reference": reference,
        "texts": sum(fork is None for fork in forks) / len(forks),
        "tokens_before_the_first_difference": same / sum(len(a) for a, _ in pairs),
    }


def inputs_of(samples: Sequence[RunSample], costs: Costs) -> Inputs | None:
    """Return what the limits of one round of our own system depend on; None where it made no round."""
    told, tokens = metrics.told_of(samples), metrics.tokens_per_round(samples)
    if tokens is None:
        return None
    num_rounds = sum(each.num_rounds for each in told)
    # Forwards of prompts, of probes and of levels that were dropped made no tree deeper; lookup's nodes took none.
    levels = [min(each.draft_forwards, each.speculative_decoding.num_path_tokens) for each in told]
    return Inputs(
        tokens_per_round=tokens,
        num_levels=sum(levels) / num_rounds,
        level_s=costs.level_s or 0.0,
        verify_s=sum(_verifying_s(each, costs) for each in told) / num_rounds,
        verify_one_s=costs.verify_seconds(1),
        round_trip_s=costs.round_trip_s,
        hit_rate=metrics.kept_share(samples),
    )


def _verifying_s(told: Told, costs: Costs) -> float:
    """Return t_v summed over the rounds of a generation: those with a tree at their mean rows, the others at one."""
    counts = told.speculative_decoding
    rows = 1 + counts.num_draft_tokens / max(1, counts.num_spec_steps)
    without_tree = told.num_rounds - counts.num_spec_steps
    return counts.num_spec_steps * costs.verify_seconds(rows) + without_tree * costs.verify_seconds(1)


def limits_of(rounds: Rounds, costs: Sequence[Costs], mode: str | None) -> Record | None:
    """Return the limits and the fractions of them that were reached, over the rounds; None where there are none."""
    found: list[Record] = []
    for samples, cost in zip(rounds, costs, strict=True):
        inputs, rate = inputs_of(samples, cost), metrics.decode_rate(samples)
        if inputs is None or rate is None:
            return None
        found.append(reached(inputs, rate, may_stream=mode in _STREAMING))
    names = [name for name in found[0] if name != "inputs"]
    return {
        **{name: estimate([each[name] for each in found]).to_dict() for name in names},
        "inputs": {letter: median([each["inputs"][letter] for each in found]) for letter in found[0]["inputs"]},
        "verify_s": {
            str(rows): median([cost.verify_s[rows] for cost in costs]) for rows in (costs[0].verify_s if costs else ())
        },
    }
