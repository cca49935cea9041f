"""Whole measurements of systems that alternate, in memory: what the studies need that write no file as they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measuring import ShouldStop, Tick, running_order
from benchmarks.systems import Sample, System, Task

Round = dict[str, list[Sample]]
"""Each system's samples of one round, in the order of the tasks."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Whole rounds only."""

    rounds: list[Round]
    was_interrupted: bool

    def samples(self, name: str) -> list[list[Sample]]:
        """Return a system's samples, [rounds][tasks]."""
        return [samples[name] for samples in self.rounds]


def num_runs(systems: Sequence[object], tasks: Sequence[object], num_rounds: int, num_warm_ups: int) -> int:
    """Return how often `alternate` ticks, for a progress bar."""
    return len(systems) * (num_rounds * len(tasks) + min(num_warm_ups, len(tasks)))


def alternate(
    systems: Sequence[System],
    tasks: Sequence[Task],
    num_rounds: int,
    *,
    num_warm_ups: int,
    tick: Tick,
    should_stop: ShouldStop,
) -> Measurement:
    """Have every system do every task once a round; the first `num_warm_ups` tasks are done once before, unrecorded."""
    rounds: list[Round] = []
    was_interrupted = _round(systems, tasks[:num_warm_ups], 0, tick, should_stop) is None
    while not was_interrupted and len(rounds) < num_rounds:
        samples = _round(systems, tasks, len(rounds), tick, should_stop)
        was_interrupted = samples is None
        if samples is not None:
            rounds.append(samples)
    return Measurement(rounds, was_interrupted)


def _round(
    systems: Sequence[System], tasks: Sequence[Task], number: int, tick: Tick, should_stop: ShouldStop
) -> Round | None:
    """Have every system do every task once; None where it was interrupted."""
    samples: Round = {system.name: [] for system in systems}
    for task_number, task in enumerate(tasks):
        for system in running_order(systems, number, task_number):
            if should_stop():
                return None
            samples[system.name].append(system.generate(task))
            tick(system.name)
    return samples


def wall_times(rounds: Sequence[Sequence[Sample]]) -> list[list[float]]:
    """Return seconds, [rounds][tasks]."""
    return [[sample.wall_s for sample in samples] for samples in rounds]
