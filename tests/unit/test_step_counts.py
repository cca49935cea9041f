"""What a scheduler counts and learns of its steps, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from typing import cast

import pytest
from torch import Tensor

from specsplit.engine.batch import Task, TaskOutcome
from specsplit.engine.executor import Executor
from specsplit.engine.scheduler import Scheduler
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.runner import Runner
from specsplit.speculation.step_times import StepTimes
from tests.unit.test_pending_forwards import FarRunner
from tests.unit.test_scheduler_machine import HandExecutor, NotingRunner, work_of

TIMES = StepTimes({1: 0.01, 33: 0.012})
NUM_NODES = 4


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    made = HandClock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


class TimedRunner(NotingRunner):
    """Takes the measured time for its rows, and nothing else."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self._clock = clock

    def forward(self, sequences: Sequence[SequenceInput]) -> list[Tensor]:
        self._clock.now_s += TIMES.seconds(sum(len(sequence.token_ids) for sequence in sequences))
        return super().forward(sequences)


def scheduler_of(runner: object) -> Scheduler:
    def on_end(task: Task, outcome: TaskOutcome | None) -> None:
        assert task.error is None

    return Scheduler(cast(Runner, runner), cast(Executor, HandExecutor()), name="tested", on_end=on_end)


def add(scheduler: Scheduler, slot: int, work: Generator[SequenceInput, Tensor, int]) -> None:
    scheduler.add(Task(f"s{slot}", None, work, cast(asyncio.AbstractEventLoop, None), None))


def verifies(slot: int, count: int) -> Generator[SequenceInput, Tensor, int]:
    for _ in range(count):
        yield SequenceInput(slot, 10, [1] * (1 + NUM_NODES), num_logits=1 + NUM_NODES)
    return slot


@pytest.mark.parametrize(("between_s", "tree_s"), [(0.0, 0.0), (0.004, 0.002)])
def test_a_step_of_one_session_is_no_cost_of_others_trees(clock: HandClock, between_s: float, tree_s: float) -> None:
    scheduler = scheduler_of(runner := TimedRunner(clock))
    scheduler.budget.pace(TIMES)
    for _ in range(60):
        clock.now_s += between_s
        add(scheduler, 0, verifies(0, 2))
        add(scheduler, 1, verifies(1, 1))
        while scheduler.has_work:
            scheduler.step()
    assert [len(step) for step in runner.steps] == [2, 1] * 60
    assert scheduler.budget.verification.tree_s == pytest.approx(tree_s, rel=0.01, abs=1e-9)


def test_steps_that_are_under_way_at_once_are_busy_once(clock: HandClock) -> None:
    scheduler = scheduler_of(runner := FarRunner(max_pending=2))

    def begin(slot: int, at_s: float) -> None:
        clock.now_s = at_s
        add(scheduler, slot, work_of(slot, [1]))
        scheduler.step()

    def land(number: int, at_s: float) -> float:
        clock.now_s = at_s
        runner.forwards[number].land()
        scheduler.step()
        return scheduler.counts.busy_s

    begin(0, 100)
    begin(1, 103)
    assert land(1, 105) == 5, "the first one was under way since 100"
    begin(2, 108)
    assert land(0, 110) == 10
    assert land(2, 114) == 14
    begin(3, 120)
    assert land(3, 121) == 15, "nothing was under way from 114 to 120"
    assert scheduler.counts.num_steps == 4
