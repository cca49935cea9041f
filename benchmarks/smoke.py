"""`smoke`: our plain decoding and pingpong against transformers on the embedded pair, alternately.

Checks the bars that need one machine only: P1, P2, P3, P4, P8, P9.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks import workloads
from benchmarks.agreement import differences
from benchmarks.alternation import Measurement, Tick, alternate, interrupts_between_runs, num_runs
from benchmarks.bars import Bar
from benchmarks.environment import provenance
from benchmarks.metrics import acceptance, overhead_ms
from benchmarks.neighbours import Neighbours
from benchmarks.peers.factories import serve_bare_forward, serve_loopback, serve_modes, serve_transformers
from benchmarks.peers.modes import ServedMode, Shape
from benchmarks.processes import Child
from benchmarks.report.console import Progress
from benchmarks.statistics import BOOTSTRAP_SEED, CONFIDENCE, Estimate, estimate, median, paired_speedup, quantile
from benchmarks.systems import Sample, System, Task
from specsplit.orchestrator.request import Result

NUM_WARM_UPS = 2
PINGPONG_REMOTE = "pingpong, loopback"
PLAIN, PINGPONG, AUTO, BARE, GENERATE = "plain", "pingpong", "auto", "bare forward", "transformers generate"
ASSISTED, LOOKUP = "transformers assisted", "transformers prompt lookup"
OURS = (PLAIN, PINGPONG, AUTO, PINGPONG_REMOTE)
TRANSFORMERS = {
    GENERATE: "generate",
    f"{ASSISTED}, default": "assisted",
    f"{ASSISTED}, constant 4": "assisted-constant",
    f"{LOOKUP}, 4": "lookup-4",
    f"{LOOKUP}, 10": "lookup-10",
}
"""Ways to use transformers by the names of their systems."""
Record = dict[str, Any]
Rounds = Sequence[Sequence[Sample]]
Samples = dict[str, list[list[Sample]]]
"""[rounds][tasks] by system."""


@dataclass(frozen=True, slots=True)
class SmokeSettings:
    """The sizes of a run; the tree's shape is that of the package's defaults unless another is given."""

    num_prompts: int
    num_new_tokens: int
    num_rounds: int
    threads: int
    shape: Shape

    def to_dict(self) -> Record:
        """Return the settings in JSON types."""
        sizes = {name: value for name, value in asdict(self).items() if name != "shape"}
        fixed = {"pair": "embedded", "dtype": "fp32", "temperature": 0, "num_warm_up_prompts": NUM_WARM_UPS}
        bootstrap = {"bootstrap_seed": BOOTSTRAP_SEED, "confidence": CONFIDENCE}
        return {**fixed, **sizes, **self.shape.to_dict(), **bootstrap}


def run(settings: SmokeSettings, progress: Progress) -> Record | None:
    """Load, measure, derive; None if the run was interrupted before its first round was whole.

    Raises:
        SpecSplitError: a model cannot be loaded, or the settings do not fit it.
    """
    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, settings.num_prompts)
    origin, threads, shape = provenance(), settings.threads, settings.shape
    modes = (ServedMode(PLAIN, "plain"), ServedMode(PINGPONG, "pingpong", shape), ServedMode(AUTO, "auto", shape))
    factories = {
        "SpecSplit": serve_modes(threads, modes),
        "SpecSplit on loopback": serve_loopback(threads, ServedMode(PINGPONG_REMOTE, "pingpong", shape)),
        "the bare forward": serve_bare_forward(threads, BARE),
        "transformers": serve_transformers(threads, TRANSFORMERS),
    }
    with ExitStack() as scope:
        children = [scope.enter_context(Child(name, factory)) for name, factory in factories.items()]
        ours, loopback = children[:2]
        with progress.running("loading", len(children)) as loaded:
            systems = [system for child in children for system in _loaded(child, loaded)]
        chunk_tokens = ours.ask("prefill_chunk_tokens")
        tasks = [Task(prompt.id, ours.ask("encode", prompt.text), settings.num_new_tokens) for prompt in prompts]
        runs = num_runs(systems, tasks, settings.num_rounds, NUM_WARM_UPS)
        neighbours = Neighbours([*(child.pid for child in children), *loopback.ask("pids")])
        with interrupts_between_runs() as should_stop, progress.running("measuring", runs) as tick:
            measured = alternate(
                systems, tasks, settings.num_rounds, num_warm_ups=NUM_WARM_UPS, tick=tick, should_stop=should_stop
            )
        share = neighbours.share()
        if not measured.rounds:
            return None
        wire_bytes = loopback.ask("wire_bytes", tasks[0].prompt_ids, settings.num_new_tokens)
        listed = differences(tasks, PLAIN, measured.rounds, partial(ours.ask, "top2_margin"))
    return {
        "benchmark": "smoke",
        "neighbours_share": share,
        "provenance": origin,
        "prompts": {"ids": [prompt.id for prompt in prompts], "sha256": workloads.fingerprint(prompts)},
        **derive(settings, chunk_tokens, measured, wire_bytes),
        "num_differences": len(listed),
        "num_ties": sum(difference.is_tie for difference in listed),
        "differences": [difference.to_dict() for difference in listed],
    }


def _loaded(child: Child, tick: Tick) -> list[System]:
    systems = child.wait_systems()
    tick(", ".join(system.name for system in systems[:2]))
    return systems


def derive(
    settings: SmokeSettings, chunk_tokens: int, measured: Measurement, wire_bytes: dict[str, float] | None = None
) -> Record:
    """Return the numbers that follow from the samples."""
    samples = {name: measured.samples(name) for name in measured.rounds[0]}
    num_tokens = settings.num_new_tokens
    decode = {name: decode_rates(rounds, num_tokens) for name, rounds in samples.items()}
    overheads = {name: [overhead_ms(each) for each in results(samples[name])] for name in OURS if name in samples}
    # Each prompt counts once: the accepted tokens are the same in every round.
    accepted = acceptance(result.speculative_decoding for result in results(samples[PINGPONG][:1]))
    return {
        "is_complete": not measured.was_interrupted,
        "num_rounds": len(measured.rounds),
        "settings": settings.to_dict(),
        "tokens_per_s": {name: estimate(values).to_dict() for name, values in rates(samples, num_tokens).items()},
        "decode_tokens_per_s": {name: estimate(values).to_dict() for name, values in decode.items() if values},
        "bars": [bar.to_dict() for bar in check_bars(samples, num_tokens, chunk_tokens, wire_bytes)],
        "overhead_ms": {
            name: {"median": median(values), "p95": quantile(values, 0.95)} for name, values in overheads.items()
        },
        "acceptance": accepted.to_dict(),
        "samples": {name: _raw(rounds) for name, rounds in samples.items()},
    }


def _raw(rounds: Rounds) -> Record:
    raw: Record = {"wall_s": wall_times(rounds)}
    told = [results([row]) for row in rounds]
    if told[0]:
        for name in ("ttft_s", "decode_s", "draft_device_s", "target_device_s"):
            raw[name] = [[getattr(result.timings, name) for result in row] for row in told]
        for name in ("num_rounds", "target_forwards", "draft_forwards"):
            raw[name] = [getattr(result, name) for result in told[0]]
    return raw


def rates(samples: Samples, num_tokens: int) -> dict[str, list[float]]:
    """Return each system's tokens per second, one per round; a bare forward's prompt is not in it."""
    return {
        name: [(num_tokens - (name == BARE)) * len(row) / sum(sample.wall_s for sample in row) for row in rounds]
        for name, rounds in samples.items()
    }


def decode_rates(rounds: Rounds, num_tokens: int) -> list[float]:
    """Return, per round, the tokens after each task's first over the time they took; nothing if it was not told."""
    times = [[sample.decode_s for sample in row if sample.decode_s is not None] for row in rounds]
    if any(len(known) < len(row) for known, row in zip(times, rounds, strict=True)):
        return []
    return [(num_tokens - 1) * len(row) / sum(row) for row in times]


def better_of(by_system: dict[str, list[float]], prefix: str) -> str:
    """Return the name of the fastest variant of a peer."""
    variants = [name for name in by_system if name.startswith(prefix)]
    return max(variants, key=lambda name: median(by_system[name]))


def wall_times(rounds: Rounds) -> list[list[float]]:
    """Return seconds, [rounds][tasks]."""
    return [[sample.wall_s for sample in samples] for samples in rounds]


def results(rounds: Rounds) -> list[Result]:
    """Return the results that our own systems tell."""
    return [sample.result for samples in rounds for sample in samples if sample.result is not None]


def forwards_per_round(generations: Sequence[Result], chunk_tokens: int) -> list[float]:
    """Return each generation's target forwards per round, without the prompt's: one per `chunk_tokens` begun."""
    return [
        (each.target_forwards - -(-len(each.prompt_token_ids) // chunk_tokens)) / each.num_rounds
        for each in generations
    ]


def check_bars(
    samples: Samples, num_tokens: int, prefill_chunk_tokens: int, wire_bytes: dict[str, float] | None = None
) -> list[Bar]:
    """Return every bar that can be checked on these samples; `wire_bytes` are a round's, by link and direction."""

    def ratio(system: str, baseline: str) -> Estimate:
        return paired_speedup(wall_times(samples[baseline]), wall_times(samples[system]))

    by_system = rates(samples, num_tokens)
    ours = AUTO if AUTO in samples else PINGPONG
    assisted, lookup = better_of(by_system, ASSISTED), better_of(by_system, LOOKUP)
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


def _overhead_bar(measure: str, rounds: Rounds, bound: float) -> Bar:
    overheads = [[overhead_ms(result) for result in results([row])] for row in rounds]
    p95 = quantile([value for row in overheads for value in row], 0.95)
    value = estimate([median(row) for row in overheads])
    return Bar("P4", measure, value, "<=", bound, f"p95 {p95:.2f} over generations")


def _loopback_bars(samples: Samples, wire_bytes: dict[str, float] | None) -> list[Bar]:
    if PINGPONG_REMOTE not in samples:
        return []
    found = [_overhead_bar("the same, workers on loopback", samples[PINGPONG_REMOTE], 2.0)]
    for link, value in (wire_bytes or {}).items():
        found.append(Bar("P8", f"bytes a round, {link}", estimate([value]), "<=", 400, "32 nodes; all TCP payload"))
    return found
