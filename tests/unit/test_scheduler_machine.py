"""The scheduler against a plain model: which tasks a step takes, and how each of them ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from specsplit.core.errors import DeadlineExceeded, SpecSplitError
from specsplit.core.types import SessionParams
from specsplit.engine.batch import MOST_ROUND_ROWS, Task, TaskOutcome
from specsplit.engine.executor import Executor
from specsplit.engine.prompt_budget import LEAST_PROMPT_ROWS, MAX_STEP_ROWS
from specsplit.engine.scheduler import Scheduler
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.runner import Runner
from specsplit.speculation.step_times import StepTimes

LINEAR = {1: 0.03, 33: 0.99}
"""So slow that a step with prompts takes twice its rounds' time, and never what it may take in any case."""


class NotingRunner:
    """Forwards nothing, and notes the rows of each sequence; the next step fails if it is told to."""

    max_pending = 1

    def __init__(self) -> None:
        self.steps: list[dict[int, int]] = []
        """Rows by slot, of each step."""
        self.is_failing = False

    def forward(self, sequences: Sequence[SequenceInput]) -> list[Tensor]:
        if self.is_failing:
            self.is_failing = False
            raise RuntimeError("the device failed")
        self.steps.append({sequence.slot: len(sequence.token_ids) for sequence in sequences})
        return [torch.zeros(1, 1) for _ in sequences]


class HandExecutor:
    """An executor whose steps are the test's."""

    is_alive = True
    can_wait = True

    def submit(self, scheduler: Any, accept: Callable[[], None]) -> None:
        accept()

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        settle()


@dataclass
class Expected:
    """A task in the model: the rows of its forwards that are still to come."""

    forwards: list[int]
    deadline_s: float
    is_cancelled: bool = False

    @property
    def is_prompt(self) -> bool:
        return self.forwards[0] > MOST_ROUND_ROWS


def work_of(slot: int, forwards: Sequence[int]) -> Generator[SequenceInput, Tensor, int]:
    for rows in forwards:
        yield SequenceInput(slot, 0, [1] * rows)
    return slot


class SchedulerMachine(RuleBasedStateMachine):
    """Tasks come, are cancelled, run out of time and fail in any order; the model keeps dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now_s = 0.0
        self.runner, self.ended = NotingRunner(), dict[int, TaskOutcome | Exception | None]()
        executor = cast(Executor, HandExecutor())
        self.scheduler = Scheduler(cast(Runner, self.runner), executor, name="tested", on_end=self.on_end)
        self.scheduler.now = lambda: self.now_s
        self.scheduler.budget.prompts.times = StepTimes(LINEAR)
        self.params: dict[str, SessionParams] = {}
        self.scheduler.budget.prompts.params_of = self.params.get
        self.tasks: dict[int, Task] = {}
        self.live: dict[int, Expected] = {}

    def on_end(self, task: Task, outcome: TaskOutcome | None) -> None:
        self.ended[int(task.session or "")] = task.error or outcome if not task.is_cancelled else None

    @rule(
        forwards=st.lists(st.one_of(st.integers(1, 20), st.integers(65, 512)), max_size=4),
        caller=st.sampled_from("abc"),
        priority=st.integers(0, 9),
        left_s=st.sampled_from([math.inf, 0.5, 3.0]),
    )
    def add(self, forwards: list[int], caller: str, priority: int, left_s: float) -> None:
        slot, deadline_s = len(self.tasks), self.now_s + left_s
        self.params[str(slot)] = SessionParams(caller=caller, priority=priority)
        task = Task(str(slot), None, work_of(slot, forwards), self.loop, None, deadline_s)
        self.tasks[slot], self.live[slot] = task, Expected(list(forwards), deadline_s)
        self.scheduler.add(task)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self.live[slot].is_cancelled = self.tasks[slot].is_cancelled = True

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(fails=st.sampled_from([False, False, False, True]))
    def step(self, fails: bool) -> None:
        self.runner.is_failing = fails
        before = len(self.runner.steps)
        self.scheduler.step()
        over = {slot for slot, one in self.live.items() if one.is_cancelled or one.deadline_s < self.now_s}
        for slot in over:
            one = self.live.pop(slot)
            assert isinstance(self.ended[slot], DeadlineExceeded) or one.is_cancelled
        for slot in [slot for slot, one in self.live.items() if not one.forwards]:  # it never had a forward
            self.check_done(slot)
        if fails and self.live:
            assert not self.runner.is_failing
            for slot in list(self.live):
                if slot in self.ended:
                    assert isinstance(self.ended[slot], RuntimeError)
                    del self.live[slot]
            return
        self.runner.is_failing = False
        if not self.live:
            assert len(self.runner.steps) == before
            return
        self.check_taken(self.runner.steps[-1])

    def check_taken(self, taken: dict[int, int]) -> None:
        """Check a step: every round goes whole, and prompts take what the budget leaves them, at least something."""
        prompts = {slot for slot, one in self.live.items() if self.is_prompt(slot)}
        rounds = set(self.live) - prompts
        assert rounds <= set(taken) <= set(self.live)
        for slot in rounds:
            assert taken[slot] == self.live[slot].forwards[0]
        rows = sum(taken[slot] for slot in prompts & set(taken))
        most = LEAST_PROMPT_ROWS if rounds else MAX_STEP_ROWS
        round_rows = sum(taken[slot] for slot in rounds)
        assert rows <= max(most, round_rows)  # twice a step of linear cost at most
        assert not prompts or rows >= min(LEAST_PROMPT_ROWS, sum(self.live[slot].forwards[0] for slot in prompts))
        for slot, count in taken.items():
            forwards = self.live[slot].forwards
            forwards[0] -= count
            if not forwards[0]:
                del forwards[0]
                self.whole.discard(slot)
            else:
                self.whole.add(slot)
            if not forwards:
                self.check_done(slot)

    def is_prompt(self, slot: int) -> bool:
        return slot in self.whole or self.live[slot].is_prompt

    @property
    def whole(self) -> set[int]:
        """Prompts of which a part was taken: the rest counts as one, however few rows it has."""
        return self.__dict__.setdefault("_begun", set())

    def check_done(self, slot: int) -> None:
        del self.live[slot]
        outcome = self.ended[slot]
        assert isinstance(outcome, tuple)
        assert outcome[0] == slot

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.tasks) == set(self.live) | set(self.ended)
        assert self.scheduler.has_work == bool(self.live)

    def teardown(self) -> None:
        self.scheduler.abandon()
        assert all(isinstance(self.ended[slot], SpecSplitError) or self.live[slot].is_cancelled for slot in self.live)
        self.loop.close()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
