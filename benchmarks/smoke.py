"""`smoke`: a `run` of all systems of the bars on the embedded pair.

Checks the bars that need one machine only: P1, P2, P3, P4, P8, P9.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks import measuring, registry, workloads
from benchmarks import run as bench
from benchmarks.metrics import acceptance, overhead_ms, rate, told_of
from benchmarks.registry import BARE, GENERATE, PLAIN
from benchmarks.report.console import Progress
from benchmarks.results_file import RUN, Run
from benchmarks.statistics import Bar, Estimate, estimate, median, paired_speedup, quantile
from benchmarks.systems import Rounds

PINGPONG, PINGPONG_REMOTE, AUTO = "pingpong", "pingpong@loopback", "auto"
ASSISTED, LOOKUP = ("assisted", "assisted-constant"), ("lookup-4", "lookup-10")
SYSTEMS = {
    PLAIN: "plain",
    PINGPONG: "pingpong",
    AUTO: "auto",
    PINGPONG_REMOTE: "pingpong, loopback",
    BARE: "bare forward",
    GENERATE: "transformers generate",
    "assisted": "transformers assisted, default",
    "assisted-constant": "transformers assisted, constant 4",
    "lookup-4": "transformers prompt lookup, 4",
    "lookup-10": "transformers prompt lookup, 10",
}
"""What a line of `smoke` calls the systems."""
Record = dict[str, Any]


def run(settings: bench.RunSettings, progress: Progress, tell: measuring.Tell) -> Record | None:
    """Load, measure, derive; None if the run was interrupted before its first round was whole.

    Raises:
        SpecSplitError: a model cannot be loaded, or the settings do not fit it.
    """
    entries = [registry.find(name, settings) for name in settings.systems]
    prompts = workloads.load(settings.workload, settings.num_prompts)
    wire_bytes: dict[str, float] = {}

    def ready(scope: ExitStack) -> bench.Bench:
        loaded = bench.set_up(scope, settings, entries, prompts, progress)
        wire_bytes.update(loaded.children[PINGPONG_REMOTE].ask("wire_bytes", loaded.tasks[0].prompt_ids))
        return loaded

    header = measuring.new_header(RUN, settings.to_dict(), prompts)
    found = measuring.measure(None, header, ready, progress, tell)
    if found is None:
        return None
    shared = ("provenance", "models", "settings", "prompts")
    whole = ("is_complete", "num_rounds", "neighbours_share", "num_differences", "num_ties")
    return {
        "benchmark": "smoke",
        **{name: found.file.header[name] for name in shared},
        **{name: found.summary[name] for name in whole},
        "differences": [{**each, "system": SYSTEMS[each["system"]]} for each in found.summary["differences"]],
        **derive(found.file.run(), found.summary["systems"], wire_bytes),
    }


def derive(run: Run, systems: Record, wire_bytes: dict[str, float]) -> Record:
    """Return the numbers of `smoke`; `systems` are those of the run's summary."""
    pooled = {SYSTEMS[name]: system["pooled"] for name, system in systems.items()}
    # A bare forward takes in no prompt.
    rates = {name: block["tokens_per_s"] or block["decode_tokens_per_s"] for name, block in pooled.items()}
    # Each prompt counts once: the accepted tokens are the same in every round.
    accepted = acceptance(each.speculative_decoding for each in told_of(run.samples[PINGPONG][0]))
    return {
        "tokens_per_s": rates,
        "decode_tokens_per_s": {
            name: block["decode_tokens_per_s"] for name, block in pooled.items() if block["decode_tokens_per_s"]
        },
        "bars": [bar.to_dict() for bar in check_bars(run, wire_bytes)],
        "overhead_ms": {name: block["overhead_ms"] for name, block in pooled.items() if "overhead_ms" in block},
        "acceptance": accepted.to_dict(),
        "samples": {SYSTEMS[name]: _raw(rounds) for name, rounds in run.samples.items()},
    }


def _raw(rounds: Rounds) -> Record:
    raw: Record = {"wall_s": wall_times(rounds)}
    told = [told_of(row) for row in rounds]
    if told[0]:
        for name in ("ttft_s", "decode_s", "draft_device_s", "target_device_s"):
            raw[name] = [[getattr(each.timings, name) for each in row] for row in told]
        for name in ("num_rounds", "target_forwards", "draft_forwards"):
            raw[name] = [getattr(each, name) for each in told[0]]
    return raw


def wall_times(rounds: Rounds) -> list[list[float]]:
    """Return seconds, [rounds][tasks]."""
    return [[sample.wall_s for sample in samples] for samples in rounds]


def forwards_per_round(run: Run, system: str) -> list[float]:
    """Return each generation's target forwards per round, without the prompt's: one per chunk of it begun."""
    chunk = run.header["prefill_chunk_tokens"]
    lengths = {task["id"]: task["num_prompt_tokens"] for task in run.header["prompts"]["tasks"]}
    samples = [sample for row in run.samples[system] for sample in row]
    pairs = [(each.told, -(-lengths[each.task] // chunk)) for each in samples if each.told is not None]
    return [(told.target_forwards - num_chunks) / told.num_rounds for told, num_chunks in pairs]


def check_bars(run: Run, wire_bytes: dict[str, float]) -> list[Bar]:
    """Return every bar that a run of SYSTEMS can check; `wire_bytes` are a round's, by link and direction."""
    samples = run.samples

    def ratio(system: str, baseline: str) -> Estimate:
        return paired_speedup(wall_times(samples[baseline]), wall_times(samples[system]))

    assisted, lookup = (
        max(ways, key=lambda name: median([rate(row) for row in samples[name]])) for ways in (ASSISTED, LOOKUP)
    )
    plain_decode_s = [[sample.decode_s or sample.wall_s for sample in row] for row in samples[PLAIN]]
    plain_over_bare = paired_speedup(wall_times(samples[BARE]), plain_decode_s)
    forwards = estimate(forwards_per_round(run, PINGPONG))
    return [
        Bar("P1", "plain / transformers generate", ratio(PLAIN, GENERATE), ">=", 1.1),
        Bar("P1", "plain / bare forward", plain_over_bare, ">=", 0.93, "the bar of deeper targets"),
        Bar("P2", f"{AUTO} / plain", ratio(AUTO, PLAIN), ">=", 1.8),
        Bar("P3", f"{AUTO} / {SYSTEMS[assisted]}", ratio(AUTO, assisted), ">=", 1.5, "the better one"),
        Bar("P3", f"{AUTO} / {SYSTEMS[lookup]}", ratio(AUTO, lookup), ">=", 1.15, "the better one"),
        _overhead_bar("ms a round beside the forwards", samples[PINGPONG], 1.0),
        _overhead_bar("the same, workers on loopback", samples[PINGPONG_REMOTE], 2.0),
        *(
            Bar("P8", f"bytes a round, {link}", estimate([value]), "<=", 400, "32 nodes; all TCP payload")
            for link, value in wire_bytes.items()
        ),
        Bar("P9", "target forwards a round", forwards, "==", 1, "the prompt's left out"),
    ]


def _overhead_bar(measure: str, rounds: Rounds, bound: float) -> Bar:
    overheads = [[overhead_ms(told) for told in told_of(row)] for row in rounds]
    p95 = quantile([value for row in overheads for value in row], 0.95)
    value = estimate([median(row) for row in overheads])
    return Bar("P4", measure, value, "<=", bound, f"p95 {p95:.2f} over generations")
