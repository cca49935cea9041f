"""A run in cells: the same systems under every number of threads and every temperature, alternately in each cell.

Each number of threads has processes of its own; the temperatures share them. Derives no bar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import measuring, registry, workloads
from benchmarks import run as bench
from benchmarks.measuring import Tell
from benchmarks.metrics import rate, told_of
from benchmarks.report.console import Progress
from benchmarks.results_file import RUN, Run
from benchmarks.run import Bench, RunSettings
from benchmarks.statistics import Estimate, estimate, paired_speedup
from benchmarks.systems import Rounds
from specsplit.core.errors import SpecSplitError

Record = dict[str, Any]
Inspect = Callable[[Bench], Record]
"""Asks loaded systems for what no run tells."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured with one number of threads and at one temperature."""

    threads: int
    temperature: float
    run: Run
    summary: Record
    facts: Record
    """What was asked of the loaded systems."""

    @property
    def name(self) -> str:
        threads = "thread" if self.threads == 1 else "threads"
        return f"T {self.temperature:g}, {self.threads} {threads}"

    def ratio(self, system: str, baseline: str) -> Estimate:
        """Return how many times as fast as the baseline a system is, prompts included."""
        return paired_speedup(wall_times(self.run.samples[baseline]), wall_times(self.run.samples[system]))

    def rates(self) -> dict[str, Estimate]:
        """Return tokens per second, prompts included, by system; a bare forward takes in no prompt."""
        listed = {name: rounds for name, rounds in self.run.samples.items() if name != registry.BARE}
        return {name: estimate([rate(row) for row in rounds]) for name, rounds in listed.items()}

    def to_dict(self) -> Record:
        """Return the cell in JSON types, with the samples from which all of it can be derived again."""
        return {
            "threads": self.threads,
            "temperature": self.temperature,
            "num_rounds": self.run.num_rounds,
            "neighbours_share": self.summary["neighbours_share"],
            "differences": self.summary["differences"],
            "tokens_per_s": {name: value.to_dict() for name, value in self.rates().items()},
            "facts": self.facts,
            "samples": {name: _raw(rounds) for name, rounds in self.run.samples.items()},
        }


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells that became whole, and the facts that they share."""

    header: Record
    cells: list[Cell]
    is_complete: bool

    def to_dict(self) -> Record:
        """Return the facts and the cells in JSON types."""
        differences = [{"cell": cell.name, **each} for cell in self.cells for each in cell.summary["differences"]]
        shares = [share for cell in self.cells if (share := cell.summary["neighbours_share"]) is not None]
        return {
            **{name: self.header[name] for name in ("provenance", "models", "settings", "prompts")},
            "is_complete": self.is_complete,
            "num_rounds": min(cell.run.num_rounds for cell in self.cells),
            "neighbours_share": max(shares, default=None),
            "num_compared": sum(cell.summary["num_compared"] for cell in self.cells),
            "num_differences": len(differences),
            "num_ties": sum(each["is_tie"] for each in differences),
            "differences": differences,
            "cells": [cell.to_dict() for cell in self.cells],
        }


def measure(
    settings: RunSettings,
    threads: Sequence[int],
    temperatures: Sequence[float],
    progress: Progress,
    tell: Tell,
    inspect: Inspect = lambda loaded: {},
) -> Cells | None:
    """Measure every cell; None if none became whole. Ctrl-C or an error ends it, and the cells so far are kept.

    Raises:
        SpecSplitError: a model cannot be loaded, or the settings do not fit it, before there is any cell.
    """
    prompts = workloads.load(settings.workload, settings.num_prompts, settings.sha256)
    header: Record = {}
    cells: list[Cell] = []

    def add_cells(count: int, should_stop: measuring.ShouldStop) -> bool:
        """Measure the cells of one number of threads; return whether Ctrl-C ended it."""
        chosen = replace(settings, threads=count, measures_costs=False)
        entries = bench.find_entries(chosen)
        with ExitStack() as scope:
            loaded = bench.set_up(scope, chosen, entries, prompts, progress)
            for name, why in loaded.skipped.items():
                tell(f"Skipped {name}: {why}")
            facts = inspect(loaded)
            for temperature in temperatures:
                own = measuring.new_header(RUN, replace(chosen, temperature=temperature).to_dict(), prompts)
                found = None if should_stop() else measuring.measure(None, own, lambda scope: loaded, progress, tell)
                if found is not None:
                    header.update(header or own)
                    cells.append(Cell(count, temperature, found.file.run(), found.summary, facts))
                if found is None or found.was_interrupted:
                    return True
        return False

    try:
        with measuring.interrupts_between_runs() as should_stop:
            for count in threads:
                if add_cells(count, should_stop):
                    break
    except SpecSplitError as error:
        if not cells:
            raise
        tell(f"The other cells are missing: {error}")
    # The facts of the first cell stand for all.
    header["settings"] = {**header.get("settings", {}), "threads": list(threads), "temperature": list(temperatures)}
    num_rounds = [settings.num_rounds] * len(threads) * len(temperatures)
    return Cells(header, cells, [cell.run.num_rounds for cell in cells] == num_rounds) if cells else None


def wall_times(rounds: Rounds) -> list[list[float]]:
    """Return seconds, [rounds][tasks]."""
    return [[sample.wall_s for sample in samples] for samples in rounds]


def _raw(rounds: Rounds) -> Record:
    raw: Record = {"wall_s": wall_times(rounds)}
    told = [told_of(row) for row in rounds]
    if told[0]:
        for name in ("ttft_s", "decode_s", "draft_device_s", "target_device_s"):
            raw[name] = [[getattr(each.timings, name) for each in row] for row in told]
        for name in ("num_rounds", "target_forwards", "draft_forwards"):
            raw[name] = [[getattr(each, name) for each in row] for row in told]
    return raw
