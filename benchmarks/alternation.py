"""Runs systems alternately over tasks, so that a noisy machine disturbs all of them alike.

Knows no system and no statistics. An interrupted run keeps its whole rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.systems import Sample, System, Task

Round = dict[str, list[Sample]]
"""Each system's samples of one round, in the order of the tasks."""
Tick = Callable[[str], None]
"""Called with a system's name when it has done a task."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Whole rounds only."""

    rounds: list[Round]
    was_interrupted: bool

    def samples(self, name: str) -> list[list[Sample]]:
        """Return a system's samples, [rounds][tasks]."""
        return [samples[name] for samples in self.rounds]


def running_order(systems: Sequence[System], round_number: int, task_number: int) -> list[System]:
    """Return the systems in an order that rotates with round and task and turns round every other round.

    So each system has each place, and is preceded by each of its neighbours.
    """
    start = (round_number + task_number) % len(systems)
    rotated = [*systems[start:], *systems[:start]]
    return rotated[::-1] if round_number % 2 else rotated


def num_runs(systems: Sequence[System], tasks: Sequence[Task], num_rounds: int, num_warm_ups: int) -> int:
    """Return how often `alternate` ticks, for a progress bar."""
    return len(systems) * (num_rounds * len(tasks) + min(num_warm_ups, len(tasks)))


def alternate(
    systems: Sequence[System], tasks: Sequence[Task], num_rounds: int, *, num_warm_ups: int = 2, tick: Tick
) -> Measurement:
    """Have every system do every task once a round; the first `num_warm_ups` tasks are done once before, unrecorded.

    A keyboard interrupt ends the measurement; the rounds that were whole by then are returned.
    """
    rounds: list[Round] = []
    try:
        for task in tasks[:num_warm_ups]:
            for system in systems:
                system.generate(task)
                tick(system.name)
        for number in range(num_rounds):
            rounds.append(_run_round(systems, tasks, number, tick))  # noqa: PERF401 - an interrupt keeps what is appended
    except KeyboardInterrupt:
        return Measurement(rounds, was_interrupted=True)
    return Measurement(rounds, was_interrupted=False)


def _run_round(systems: Sequence[System], tasks: Sequence[Task], number: int, tick: Tick) -> Round:
    samples: Round = {system.name: [] for system in systems}
    for task_number, task in enumerate(tasks):
        for system in running_order(systems, number, task_number):
            samples[system.name].append(system.generate(task))
            tick(system.name)
    return samples
