"""`smoke`: our plain decoding and pingpong against transformers on the embedded pair, alternately.

Measures, then derives; what is printed is the report's business.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks import bars, workloads
from benchmarks.agreement import Difference, differences
from benchmarks.alternation import Measurement, Round, Tick, alternate, interrupts_between_runs, num_runs
from benchmarks.bars import Bar
from benchmarks.environment import provenance
from benchmarks.metrics import Acceptance, acceptance, decode_tokens_per_s, overhead_ms
from benchmarks.neighbours import Neighbours
from benchmarks.peers.factories import (
    ServeBareForward,
    ServedMode,
    ServeLoopback,
    ServeModes,
    ServeTransformers,
    Shape,
)
from benchmarks.processes import Child
from benchmarks.report import Progress
from benchmarks.statistics import BOOTSTRAP_SEED, CONFIDENCE, Estimate, estimate, median, quantile
from benchmarks.systems import System, Task

NUM_WARM_UPS = 2
OURS = (bars.PLAIN, bars.PINGPONG, bars.AUTO, bars.PINGPONG_REMOTE)


@dataclass(frozen=True, slots=True)
class SmokeSettings:
    """What is run; the tree's shape is that of the package's defaults unless told otherwise."""

    num_prompts: int
    num_new_tokens: int
    num_rounds: int
    threads: int
    shape: Shape

    def to_dict(self) -> dict[str, object]:
        """Return the settings in JSON types."""
        return {
            "pair": "embedded",
            "dtype": "fp32",
            "temperature": 0,
            "num_prompts": self.num_prompts,
            "num_new_tokens": self.num_new_tokens,
            "num_rounds": self.num_rounds,
            "num_warm_up_prompts": NUM_WARM_UPS,
            "threads": self.threads,
            "nodes": self.shape.nodes,
            "depth": self.shape.depth,
            "branching": self.shape.branching,
            "bootstrap_seed": BOOTSTRAP_SEED,
            "confidence": CONFIDENCE,
        }


@dataclass(frozen=True, slots=True)
class Smoke:
    """All that one run found."""

    settings: SmokeSettings
    provenance: dict[str, object]
    prompts: dict[str, object]
    num_rounds: int
    was_interrupted: bool
    neighbours_share: float | None
    rates: dict[str, Estimate]
    decode_rates: dict[str, Estimate]
    bars: list[Bar]
    overhead_ms: dict[str, dict[str, float]]
    acceptance: Acceptance
    differences: list[Difference]
    samples: dict[str, dict[str, object]]

    def to_dict(self) -> dict[str, object]:
        """Return the whole result in JSON types."""
        return {
            "benchmark": "smoke",
            "is_complete": not self.was_interrupted,
            "num_rounds": self.num_rounds,
            "neighbours_share": self.neighbours_share,
            "provenance": self.provenance,
            "settings": self.settings.to_dict(),
            "prompts": self.prompts,
            "tokens_per_s": {name: value.to_dict() for name, value in self.rates.items()},
            "decode_tokens_per_s": {name: value.to_dict() for name, value in self.decode_rates.items()},
            "bars": [bar.to_dict() for bar in self.bars],
            "overhead_ms": self.overhead_ms,
            "acceptance": self.acceptance.to_dict(),
            "num_differences": len(self.differences),
            "num_ties": sum(difference.is_tie for difference in self.differences),
            "differences": [difference.to_dict() for difference in self.differences],
            "samples": self.samples,
        }


def run(settings: SmokeSettings, progress: Progress) -> Smoke | None:
    """Load, measure, derive; None where the run was interrupted before its first round was whole.

    Raises:
        SpecSplitError: a model cannot be loaded, or the settings do not fit it.
    """
    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, settings.num_prompts)
    origin, threads = provenance(), settings.threads
    trees = ServedMode(bars.PINGPONG_REMOTE, "pingpong", settings.shape)
    with ExitStack() as scope:
        ours = scope.enter_context(Child("SpecSplit", ServeModes(threads, _modes(settings.shape))))
        loopback = scope.enter_context(Child("SpecSplit on loopback", ServeLoopback(threads, trees)))
        others = [("the bare forward", ServeBareForward(threads)), ("transformers", ServeTransformers(threads))]
        children = [ours, loopback, *(scope.enter_context(Child(name, serve)) for name, serve in others)]
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
        found = differences(tasks, bars.PLAIN, measured.rounds, partial(ours.ask, "top2_margin"))
    told: dict[str, object] = {"ids": [prompt.id for prompt in prompts], "sha256": workloads.fingerprint(prompts)}
    return derive(settings, chunk_tokens, origin, told, measured, found, share, wire_bytes)


def _modes(shape: Shape) -> tuple[ServedMode, ...]:
    fixed = (ServedMode(bars.PLAIN, "plain"), ServedMode(bars.PINGPONG, "pingpong", shape))
    return (*fixed, ServedMode(bars.AUTO, "auto", shape))


def _loaded(child: Child, tick: Tick) -> list[System]:
    systems = child.wait_systems()
    tick(", ".join(system.name for system in systems[:2]))
    return systems


def derive(
    settings: SmokeSettings,
    chunk_tokens: int,
    origin: dict[str, object],
    prompts: dict[str, object],
    measured: Measurement,
    found: list[Difference],
    neighbours_share: float | None,
    wire_bytes: dict[str, float] | None = None,
) -> Smoke:
    """Turn samples into the numbers of the report."""
    samples = {name: measured.samples(name) for name in measured.rounds[0]}
    num_tokens = settings.num_new_tokens
    decode = {name: decode_tokens_per_s(rounds, num_tokens) for name, rounds in samples.items()}
    return Smoke(
        settings=settings,
        provenance=origin,
        prompts=prompts,
        num_rounds=len(measured.rounds),
        was_interrupted=measured.was_interrupted,
        neighbours_share=neighbours_share,
        rates={name: estimate(values) for name, values in bars.rates(samples, num_tokens).items()},
        decode_rates={name: estimate(values) for name, values in decode.items() if values is not None},
        bars=bars.check_bars(samples, num_tokens, chunk_tokens, wire_bytes),
        overhead_ms={name: _overheads(samples, name) for name in OURS if name in samples},
        acceptance=_acceptance(measured.rounds[0]),
        differences=found,
        samples={name: _raw(measured, name) for name in samples},
    )


def _acceptance(first_round: Round) -> Acceptance:
    """Count each prompt once: what is accepted is the same in every round."""
    return acceptance(result.speculative_decoding for result in bars.results([first_round[bars.PINGPONG]]))


def _overheads(samples: bars.Samples, name: str) -> dict[str, float]:
    values = [overhead_ms(result) for result in bars.results(samples[name])]
    return {"median": median(values), "p95": quantile(values, 0.95)}


def _raw(measured: Measurement, name: str) -> dict[str, object]:
    rounds = measured.samples(name)
    raw: dict[str, object] = {"wall_s": bars.wall_times(rounds)}
    told = [[sample.result for sample in samples if sample.result is not None] for samples in rounds]
    if told[0]:
        timings = [[result.timings for result in row] for row in told]
        raw["ttft_s"] = [[timing.ttft_s for timing in row] for row in timings]
        raw["decode_s"] = [[timing.decode_s for timing in row] for row in timings]
        raw["draft_device_s"] = [[timing.draft_device_s for timing in row] for row in timings]
        raw["target_device_s"] = [[timing.target_device_s for timing in row] for row in timings]
        raw["num_rounds"] = [result.num_rounds for result in told[0]]
        raw["target_forwards"] = [result.target_forwards for result in told[0]]
        raw["draft_forwards"] = [result.draft_forwards for result in told[0]]
    return raw
