"""Nobody starves: random schedules of a real queue before a real scheduler, in virtual time, without a model."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import cast

import pytest

from specsplit.core.types import SessionParams
from specsplit.engine.admission import AGE_S, Opening
from specsplit.engine.batch import MOST_ROUND_ROWS, Task, TaskOutcome
from specsplit.engine.executor import Executor
from specsplit.engine.prompt_budget import LEAST_PROMPT_ROWS, QUANTUM_ROWS
from specsplit.engine.scheduler import Scheduler
from specsplit.model.runner import Runner
from specsplit.speculation.step_times import StepTimes
from tests.support.virtual_time import run_virtual
from tests.unit.test_admission import Slots
from tests.unit.test_scheduler_machine import LINEAR, HandExecutor, NotingRunner, work_of

NUM_PLACES = 64


@dataclass(frozen=True)
class Client:
    """One session to come: when, whose, how urgent, and the rows of its forwards, the prompt's first."""

    arrives_s: float
    caller: str
    priority: int | None
    forwards: tuple[int, ...]


@dataclass
class Live:
    """A piece of work in the scheduler."""

    rows: int
    caller: str
    at_arrival: dict[str, int]
    is_prompt: bool


class Worker:
    """Slots with the queue before them and the scheduler behind them, and what has to hold at every moment."""

    def __init__(self, num_slots: int) -> None:
        self.slots, self.runner = Slots(num_slots, NUM_PLACES), NotingRunner()
        executor = cast(Executor, HandExecutor())
        self.scheduler = Scheduler(cast(Runner, self.runner), executor, name="tested", on_end=self._on_end)
        self.scheduler.now = lambda: asyncio.get_running_loop().time()
        self.scheduler.budget.prompts.times = StepTimes(LINEAR)
        self.params: dict[str, SessionParams] = {}
        self.scheduler.budget.prompts.params_of = self.params.get
        self.waiting: dict[int, tuple[float, tuple[bool, float]]] = {}
        """When they came, and their ranks in the queue."""
        self.live: dict[int, Live] = {}
        self.got = dict.fromkeys("abc", 0)
        """Rows of prompts by caller."""
        self._ended: dict[str, asyncio.Event] = {}

    def _on_end(self, task: Task, outcome: TaskOutcome | None) -> None:
        assert task.error is None
        self._ended[str(task.session)].set()

    async def serve(self, number: int, one: Client) -> None:
        """Let a client come, wait for a slot, do its forwards and go."""
        loop, key = asyncio.get_running_loop(), str(number)
        await asyncio.sleep(one.arrives_s)
        rank = (one.priority is None, loop.time() - AGE_S * (one.priority or 0))
        self.waiting[number] = loop.time(), rank
        await self.slots.open(Opening(key, one.caller, one.priority))
        del self.waiting[number]
        # Of those who came before this moment none has waited longer, by as much as its priority weighs.
        before = [other for came_s, other in self.waiting.values() if came_s < loop.time()]
        assert all(rank <= other for other in before)
        self.params[key] = SessionParams(caller=one.caller, priority=one.priority or 0)
        for rows in one.forwards:
            self._ended[key] = asyncio.Event()
            self.live[number] = Live(rows, one.caller, dict(self.got), rows > MOST_ROUND_ROWS)
            self.scheduler.add(Task(key, None, work_of(number, [rows]), loop, None))
            await self._ended[key].wait()
        self.slots.free()

    async def step(self, rng: random.Random) -> None:
        """Step as long as this runs; a step takes random time."""
        while True:
            if self.scheduler.has_work:
                before = len(self.runner.steps)
                self.scheduler.step()
                if len(self.runner.steps) > before:
                    self._check(self.runner.steps[-1])
            await asyncio.sleep(rng.choice([0.01, 0.1, 3.0]))

    def _check(self, taken: dict[int, int]) -> None:
        """Check a step: rounds go whole, prompts get at least so many rows, and callers in turn."""
        prompts = {number: one for number, one in self.live.items() if one.is_prompt}
        assert all(taken.get(number) == one.rows for number, one in self.live.items() if not one.is_prompt)
        wanted = sum(one.rows for one in prompts.values())
        assert sum(taken.get(number, 0) for number in prompts) >= min(LEAST_PROMPT_ROWS, wanted)
        for number, rows in taken.items():
            one = self.live[number]
            self.got[one.caller] += rows * one.is_prompt
            one.rows -= rows
        for number in [number for number in taken if not self.live[number].rows]:
            del self.live[number]
        for one in self.live.values():
            since = {caller: count - one.at_arrival[caller] for caller, count in self.got.items()}
            assert not one.is_prompt or max(since.values()) - since[one.caller] <= 2 * QUANTUM_ROWS


def schedule(rng: random.Random) -> list[Client]:
    """Return clients that come at random, some of them scores, which have no priority."""
    return [
        Client(
            rng.choice([0.0, 0.0, 1.0, 20.0, 90.0]) * rng.random(),
            rng.choice("abc"),
            rng.choice([None, *range(10)]),
            (rng.choice([5, 70, 300, 900]), *(rng.randint(1, 20) for _ in range(rng.randint(0, 6)))),
        )
        for _ in range(rng.randint(1, 14))
    ]


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nobody_starves_before_or_behind_the_slots(count: int) -> None:
    for seed in range(count):
        rng = random.Random(seed)
        clients, num_slots = schedule(rng), rng.randint(1, 4)

        async def main(
            rng: random.Random = rng, clients: list[Client] = clients, num_slots: int = num_slots
        ) -> tuple[int, bool]:
            worker = Worker(num_slots)
            stepping = asyncio.create_task(worker.step(rng))
            await asyncio.gather(*(worker.serve(number, one) for number, one in enumerate(clients)))
            stepping.cancel()
            return len(worker.slots.served), worker.scheduler.has_work

        assert run_virtual(main) == (len(clients), False), f"seed {seed}"
