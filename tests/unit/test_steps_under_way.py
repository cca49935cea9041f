"""Steps of a runner whose forwards are computed elsewhere: who goes together, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import WorkerUnreachable
from specsplit.engine.worker import Worker
from specsplit.model.plan import Entry
from specsplit.model.runner import Runner
from tests.rpc_servers import wait_until
from tests.works import Diary, submitted


class _Flight:
    def __init__(self, entries: Sequence[Entry]) -> None:
        self.slots = [entry.slot for entry in entries]
        self.future: Future[list[Tensor]] = Future()

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def when_done(self, call: Callable[[], object]) -> None:
        self.future.add_done_callback(lambda _: call())

    def result(self) -> list[Tensor]:
        return self.future.result()

    def land(self) -> None:
        if not self.is_done:
            self.future.set_result([torch.zeros(1, 320) for _ in self.slots])


class FarRunner(Runner):
    """Forwards that are under way until the test lets them land."""

    def __init__(self, max_under_way: int) -> None:
        self._max_under_way = max_under_way
        self.flights: list[_Flight] = []
        self.is_far = True
        """Whether what begins is under way until a test lets it land."""

    @property
    def max_under_way(self) -> int:
        return self._max_under_way

    def begin(self, entries: Sequence[Entry]) -> _Flight:
        self.flights.append(_Flight(entries))
        if not self.is_far:
            self.flights[-1].land()
        return self.flights[-1]

    @property
    def slots(self) -> list[list[int]]:
        return [flight.slots for flight in self.flights]

    async def wait_for(self, *slots: list[int]) -> None:
        """Wait until these steps have begun, in this order, and see that no other one has."""
        await wait_until(lambda: len(self.flights) >= len(slots))
        await asyncio.sleep(0.02)
        assert self.slots == list(slots)


@asynccontextmanager
async def far_worker(max_under_way: int = 2) -> AsyncIterator[tuple[Worker, FarRunner]]:
    runner = FarRunner(max_under_way)
    worker = Worker(runner, name="far", threads=1)
    try:
        yield worker, runner
    finally:
        runner.is_far = False
        for flight in runner.flights:
            flight.land()
        await worker.close()


async def under_way(worker: Worker, runner: FarRunner) -> tuple[asyncio.Task[object], asyncio.Task[object]]:
    """Return two sessions, a in slot 0 and b in slot 1, each with a step of its own under way."""
    first = running(worker, "a", 0)
    await runner.wait_for([0])
    second = running(worker, "b", 1)
    await runner.wait_for([0], [1])
    return first, second


def running(worker: Worker, name: str, slot: int, num_forwards: int = 1) -> asyncio.Task[object]:
    return asyncio.create_task(worker.run(name, Diary().work(name, num_forwards, slot=slot)))


async def test_a_session_that_comes_is_sent_off_beside_the_one_under_way_and_may_come_back_before_it() -> None:
    async with far_worker() as (worker, runner):
        first, second = await under_way(worker, runner)
        runner.flights[1].land()
        assert (await second)[0] == "b"
        assert not first.done()
        runner.flights[0].land()
        _, timings = await first
        assert (timings.num_forwards, timings.batch_size) == (1, 1)


async def test_no_more_steps_are_under_way_than_the_runner_takes_and_who_waits_goes_together() -> None:
    async with far_worker() as (worker, runner):
        early = await under_way(worker, runner)
        late = [running(worker, name, slot) for slot, name in enumerate("cd", 2)]
        await submitted(*late)
        await runner.wait_for([0], [1])
        runner.flights[0].land()
        await runner.wait_for([0], [1], [2, 3])
        for flight in runner.flights[1:]:
            flight.land()
        assert [(await task)[0] for task in (*early, *late)] == list("abcd")
        assert (await late[0])[1].batch_size == 2


async def test_a_step_that_is_lost_takes_its_own_sessions_only() -> None:
    async with far_worker() as (worker, runner):
        lost, kept = await under_way(worker, runner)
        runner.flights[0].future.set_exception(WorkerUnreachable("a stage is lost"))
        with pytest.raises(WorkerUnreachable, match="a stage is lost"):
            await lost
        again = running(worker, "a", 0)
        await wait_until(lambda: len(runner.flights) == 3)
        runner.flights[2].land()
        assert (await again)[0] == "a"
        runner.flights[1].land()
        assert (await kept)[0] == "b"
        assert worker.is_well


async def test_closing_waits_for_what_is_under_way() -> None:
    async with far_worker() as (worker, runner):
        task = running(worker, "a", 0)
        await runner.wait_for([0])
        closing = asyncio.create_task(worker.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        runner.flights[0].land()
        await closing
        assert (await task)[0] == "a"


async def test_a_cancelled_caller_leaves_once_its_step_has_landed() -> None:
    async with far_worker() as (worker, runner):
        task = running(worker, "a", 0, num_forwards=5)
        await runner.wait_for([0])
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
        runner.flights[0].land()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runner.slots == [[0]]
        assert not worker.has_work
