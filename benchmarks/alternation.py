"""Runs systems alternately over tasks, so that a noisy machine disturbs all of them alike.

Knows no system and no statistics. An interrupted run keeps its whole rounds.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from benchmarks.systems import Sample, System, Task

T = TypeVar("T")
Round = dict[str, list[Sample]]
"""Each system's samples of one round, in the order of the tasks."""
Tick = Callable[[str], None]
"""Called with a system's name when it has done a task."""
ShouldStop = Callable[[], bool]
"""Asked between any two runs."""
Record = Callable[[str, Task, Sample], None]
"""Called with a system's name, the task and what came of it."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Whole rounds only."""

    rounds: list[Round]
    was_interrupted: bool

    def samples(self, name: str) -> list[list[Sample]]:
        """Return a system's samples, [rounds][tasks]."""
        return [samples[name] for samples in self.rounds]


def running_order(systems: Sequence[T], round_number: int, task_number: int) -> list[T]:
    """Return the systems in an order that turns round every other round and rotates with the task and every two rounds.

    So for each task each system has each place as often, and is preceded by each of its neighbours.
    """
    start = (round_number // 2 + task_number) % len(systems)
    rotated = [*systems[start:], *systems[:start]]
    return rotated[::-1] if round_number % 2 else rotated


def num_runs(systems: Sequence[System], tasks: Sequence[Task], num_rounds: int, num_warm_ups: int) -> int:
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
    was_interrupted = run_round(systems, tasks[:num_warm_ups], 0, tick, should_stop) is None
    while not was_interrupted and len(rounds) < num_rounds:
        samples = run_round(systems, tasks, len(rounds), tick, should_stop)
        was_interrupted = samples is None
        if samples is not None:
            rounds.append(samples)
    return Measurement(rounds, was_interrupted)


def run_round(
    systems: Sequence[System],
    tasks: Sequence[Task],
    number: int,
    tick: Tick,
    should_stop: ShouldStop,
    record: Record | None = None,
) -> Round | None:
    """Have every system do every task once; None where it was interrupted."""
    samples: Round = {system.name: [] for system in systems}
    for task_number, task in enumerate(tasks):
        for system in running_order(systems, number, task_number):
            if should_stop():
                return None
            sample = system.generate(task)
            samples[system.name].append(sample)
            if record is not None:
                record(system.name, task, sample)
            tick(system.name)
    return samples


@contextmanager
def interrupts_between_runs() -> Generator[ShouldStop]:
    """Let the first Ctrl-C end the measurement after the run that is under way, and the second one everything."""
    seen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
