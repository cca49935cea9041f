"""`sweep-tree`: which tree shape makes the embedded pair fastest, at each temperature; the defaults are chosen by it.

Every shape runs alternately with plain decoding on the same prompts and seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import workloads
from benchmarks.agreement import Difference, Margin, differences
from benchmarks.environment import Neighbours, provenance
from benchmarks.measuring import interrupts_between_runs
from benchmarks.metrics import Acceptance, acceptance
from benchmarks.processes import Child
from benchmarks.registry import PLAIN, serve_modes
from benchmarks.report.console import Progress, check_output, emit, new_console, table
from benchmarks.research.alternate import Measurement, alternate, num_runs, wall_times
from benchmarks.research.app import app
from benchmarks.research.cells import show_neighbours, spread
from benchmarks.settings import ServedMode, Shape
from benchmarks.statistics import Estimate, paired_speedup
from benchmarks.systems import Task
from specsplit.core.types import SamplingParams
from specsplit.model.extra import require_worker_extra

SEED = 1
INTERRUPTED = 130
Grid = Annotated[str, typer.Option(help="Values separated by commas.")]


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """The grid and what is run on each of its points."""

    nodes: tuple[int, ...]
    depths: tuple[int, ...]
    branchings: tuple[int, ...]
    temperatures: tuple[float, ...]
    num_prompts: int
    num_new_tokens: int
    num_rounds: int
    threads: int

    def shapes(self) -> list[Shape]:
        """Return the grid without what it holds twice: a chain has as many nodes as levels, a tree more."""
        chains = {Shape(depth, depth, 1) for depth in self.depths if 1 in self.branchings}
        trees = {
            Shape(nodes, depth, branching)
            for nodes in self.nodes
            for depth in self.depths
            for branching in self.branchings
            if branching > 1 and nodes > depth
        }
        return sorted(chains | trees)


@dataclass(frozen=True, slots=True)
class Row:
    """One shape at one temperature."""

    shape: Shape
    temperature: float
    speedup: Estimate
    acceptance: Acceptance

    def to_dict(self) -> dict[str, object]:
        """Return the row in JSON types."""
        return {
            "nodes": self.shape.nodes,
            "depth": self.shape.depth,
            "branching": self.shape.branching,
            "temperature": self.temperature,
            "speedup": self.speedup.to_dict(),
            "acceptance": self.acceptance.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Sweep:
    """All that one sweep found; an interrupted one lacks temperatures or rounds."""

    settings: SweepSettings
    provenance: dict[str, object]
    rows: list[Row]
    differences: list[Difference]
    was_interrupted: bool
    neighbours_share: float | None = None

    def overall(self) -> list[tuple[Shape, float]]:
        """Return each shape's geometric mean speed-up over the temperatures, best first."""
        means = {
            shape: _geometric_mean([row.speedup.median for row in self.rows if row.shape == shape])
            for shape in {row.shape for row in self.rows}
        }
        return sorted(means.items(), key=lambda item: -item[1])

    def to_dict(self) -> dict[str, object]:
        """Return the whole result in JSON types."""
        settings = self.settings
        return {
            "benchmark": "sweep-tree",
            "is_complete": not self.was_interrupted,
            "neighbours_share": self.neighbours_share,
            "provenance": self.provenance,
            "settings": {
                "pair": "embedded",
                "dtype": "fp32",
                "num_prompts": settings.num_prompts,
                "num_new_tokens": settings.num_new_tokens,
                "num_rounds": settings.num_rounds,
                "threads": settings.threads,
                "temperatures": list(settings.temperatures),
                "seed": SEED,
            },
            "rows": [row.to_dict() for row in self.rows],
            "overall": [{"shape": shape.name, "speedup": mean} for shape, mean in self.overall()],
            "differences": [difference.to_dict() for difference in self.differences],
        }


def run(settings: SweepSettings, progress: Progress) -> Sweep | None:
    """Measure the grid; None where the run was interrupted before anything was whole.

    Raises:
        SpecSplitError: a model cannot be loaded, or the settings do not fit it.
    """
    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, settings.num_prompts)
    rows: list[Row] = []
    found: list[Difference] = []
    was_interrupted = False
    shapes = settings.shapes()
    trees = (ServedMode(shape.name, "pingpong", shape) for shape in shapes)
    serve = serve_modes(settings.threads, (ServedMode(PLAIN, "plain"), *trees))
    with Child("SpecSplit", serve) as ours, interrupts_between_runs() as should_stop:
        systems = ours.wait_systems()
        prompt_ids = {prompt.id: ours.ask("encode", prompt.text) for prompt in prompts}
        margin: Margin = partial(ours.ask, "top2_margin")
        neighbours = Neighbours([ours.pid])
        for temperature in settings.temperatures:
            sampling = SamplingParams(temperature=temperature)
            tasks = [Task(name, ids, settings.num_new_tokens, sampling, SEED) for name, ids in prompt_ids.items()]
            with progress.running(f"T {temperature:g}", num_runs(systems, tasks, settings.num_rounds, 1)) as tick:
                measured = alternate(
                    systems, tasks, settings.num_rounds, num_warm_ups=1, tick=tick, should_stop=should_stop
                )
            if measured.rounds:
                rows.extend(derive(shapes, temperature, measured))
                found.extend(differences(tasks, PLAIN, measured.rounds, margin))
            if measured.was_interrupted:
                was_interrupted = True
                break
        share = neighbours.share()
    return Sweep(settings, provenance(), rows, found, was_interrupted, share) if rows else None


def derive(shapes: Sequence[Shape], temperature: float, measured: Measurement) -> list[Row]:
    """Return a row per shape."""
    samples = {name: measured.samples(name) for name in measured.rounds[0]}
    plain_s = wall_times(samples[PLAIN])
    results = {name: [sample.result for sample in rounds[0]] for name, rounds in samples.items()}
    return [
        Row(
            shape=shape,
            temperature=temperature,
            speedup=paired_speedup(plain_s, wall_times(samples[shape.name])),
            acceptance=acceptance(result.speculative_decoding for result in results[shape.name] if result is not None),
        )
        for shape in shapes
    ]


def show(console: Console, sweep: Sweep) -> None:
    """Print a table per temperature, the fastest shape first, and the shapes over all of them."""
    for temperature in dict.fromkeys(row.temperature for row in sweep.rows):
        listed = table(
            f"T {temperature:g}: pingpong / plain", "nodes/depth/branching", "speed-up", "tokens a round", "by depth"
        )
        rows = [row for row in sweep.rows if row.temperature == temperature]
        for row in sorted(rows, key=lambda row: -row.speedup.median):
            by_depth = " ".join("-" if rate is None else f"{rate:.2f}" for rate in row.acceptance.by_depth)
            length = f"{row.acceptance.mean_acceptance_length:.2f}"
            listed.add_row(row.shape.name, spread(row.speedup), length, by_depth)
        console.print(listed)
    best = ", ".join(f"{shape.name} {mean:.2f}" for shape, mean in sweep.overall()[:5])
    console.print(f"Geometric mean over the temperatures: {best}")
    console.print(f"Differences from plain: {len(sweep.differences)}")
    show_neighbours(console, sweep.neighbours_share)
    if sweep.was_interrupted:
        console.print("Interrupted: only whole rounds are shown.")


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@app.command("sweep-tree")
def sweep_tree(
    nodes: Grid = "4,6,8,12",
    depths: Grid = "3,4,6",
    branchings: Grid = "1,2,3",
    temperatures: Grid = "0,0.6,1",
    prompts: Annotated[int, typer.Option(min=1, help="How many of data/code_prompts.jsonl.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often every shape does every prompt.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Compare tree shapes with plain decoding at several temperatures."""
    check_output(output)
    require_worker_extra()
    shapes = [tuple(map(int, values.split(","))) for values in (nodes, depths, branchings)]
    settings = SweepSettings(*shapes, tuple(map(float, temperatures.split(","))), prompts, new_tokens, rounds, threads)
    console = new_console()
    found = run(settings, Progress(console))
    if found is None:
        console.print("Interrupted before the first round was whole; there is nothing to show.")
        raise typer.Exit(INTERRUPTED)
    show(console, found)
    emit(found.to_dict(), output)
    raise typer.Exit(INTERRUPTED if found.was_interrupted else 0)
