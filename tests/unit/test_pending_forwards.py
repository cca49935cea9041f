"""Steps of a runner whose forwards are computed elsewhere: who goes together, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import WorkerUnreachable
from specsplit.engine.scheduler import Scheduler, WorkQueue, at_once
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.runner import Runner
from specsplit.stages.chain.runner import ChainOptions, ChainRunner, ChainShape, PendingChainForward
from specsplit.stages.packet import Packet
from tests.support.rpc_servers import wait_until
from tests.support.works import Diary, submitted


class _Flight:
    def __init__(self, entries: Sequence[SequenceInput]) -> None:
        self.slots = [entry.slot for entry in entries]
        self.future: Future[list[Tensor]] = Future()
        self.goes_again = False

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def when_done(self, call: Callable[[], object]) -> None:
        self.future.add_done_callback(lambda _: call())

    def poll(self) -> list[Tensor] | None:
        if not self.goes_again:
            return self.future.result()
        self.goes_again, self.future = False, Future()
        return None

    def land(self) -> None:
        if not self.is_done:
            self.future.set_result([torch.zeros(1, 320) for _ in self.slots])

    def go_out_again(self) -> None:
        """Come back with nothing, and be under way anew."""
        self.goes_again = True
        self.future.set_result([])


class FarRunner(Runner):
    """Forwards that are under way until the test lets them land."""

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self.flights: list[_Flight] = []
        self.is_far = True
        """Whether what begins is under way until a test lets it land."""
        self.refuses = False

    @property
    def max_pending(self) -> int:
        return self._max_pending

    def begin(self, entries: Sequence[SequenceInput]) -> _Flight:
        if self.refuses:
            raise WorkerUnreachable("no stage is there")
        self.flights.append(_Flight(entries))
        if not self.is_far:
            self.flights[-1].land()
        return self.flights[-1]

    @property
    def slots(self) -> list[list[int]]:
        return [flight.slots for flight in self.flights]

    async def wait_for(self, *slots: list[int]) -> None:
        """Wait until these steps have begun, in this order."""
        await wait_until(lambda: len(self.flights) >= len(slots))
        assert self.slots == list(slots)


class FarQueue(WorkQueue):
    """The work of a runner whose forwards are computed elsewhere."""

    async def settled(self) -> None:
        """Wait until the device has done all that it was told before: it takes messages and steps in order."""
        await self.run(None, at_once(lambda: None))


@asynccontextmanager
async def far_worker(max_pending: int = 2) -> AsyncIterator[tuple[FarQueue, FarRunner]]:
    runner = FarRunner(max_pending)
    worker = FarQueue(runner, name="far", threads=1)
    try:
        yield worker, runner
    finally:
        runner.is_far = False
        for flight in runner.flights:
            flight.land()
        await worker.close()


async def under_way(worker: FarQueue, runner: FarRunner) -> tuple[asyncio.Task[object], asyncio.Task[object]]:
    """Return two sessions, a in slot 0 and b in slot 1, each with a step of its own under way."""
    first = running(worker, "a", 0)
    await runner.wait_for([0])
    second = running(worker, "b", 1)
    await runner.wait_for([0], [1])
    return first, second


def running(worker: FarQueue, name: str, slot: int, num_forwards: int = 1) -> asyncio.Task[object]:
    return asyncio.create_task(worker.run(name, Diary().work(name, num_forwards, slot=slot)))


async def test_a_second_session_is_sent_beside_the_first_and_may_overtake() -> None:
    async with far_worker() as (worker, runner):
        first, second = await under_way(worker, runner)
        runner.flights[1].land()
        assert (await second)[0] == "b"
        assert not first.done()
        runner.flights[0].land()
        _, timings = await first
        assert (timings.num_forwards, timings.batch_size) == (1, 1)


async def test_waiting_sessions_share_a_step_when_the_runner_has_room() -> None:
    async with far_worker() as (worker, runner):
        early = await under_way(worker, runner)
        late = [running(worker, name, slot) for slot, name in enumerate("cd", 2)]
        await submitted(*late)
        await worker.settled()
        assert runner.slots == [[0], [1]]
        await asyncio.sleep(0.05)
        runner.flights[0].land()
        await runner.wait_for([0], [1], [2, 3])
        for flight in runner.flights[1:]:
            flight.land()
        assert [(await task)[0] for task in (*early, *late)] == list("abcd")
        _, timings = await late[0]
        assert timings.batch_size == 2
        assert timings.queue_ms >= 50
        assert timings.queue_ms + timings.device_ms <= timings.wall_ms


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
        await worker.settled()
        closing = asyncio.create_task(worker.close())
        await submitted(closing)
        runner.flights[0].land()
        await closing
        assert (await task)[0] == "a"


async def test_a_cancelled_caller_leaves_once_its_step_has_landed() -> None:
    async with far_worker() as (worker, runner):
        task = running(worker, "a", 0, num_forwards=5)
        await runner.wait_for([0])
        task.cancel()
        await asyncio.sleep(0)
        await worker.settled()
        assert not task.done()
        runner.flights[0].land()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runner.slots == [[0]]
        assert not worker.statistics().has_work


async def test_a_step_that_goes_out_again_holds_up_nobody() -> None:
    async with far_worker() as (worker, runner):
        again, other = await under_way(worker, runner)
        runner.flights[0].go_out_again()
        await wait_until(lambda: not runner.flights[0].goes_again)
        await worker.settled()
        assert not again.done()
        runner.flights[1].land()
        assert (await other)[0] == "b"
        third = running(worker, "c", 2)
        await runner.wait_for([0], [1], [2])
        runner.flights[2].land()
        assert (await third)[0] == "c"
        runner.flights[0].land()
        assert (await again)[0] == "a"


async def test_the_device_rests_while_all_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0

    def looked(scheduler: Scheduler) -> bool:
        nonlocal num_looks
        num_looks += 1
        return can_step(scheduler)

    can_step = Scheduler.can_step.fget
    assert can_step is not None
    monkeypatch.setattr(Scheduler, "can_step", property(looked))
    async with far_worker() as (worker, runner):
        tasks = await under_way(worker, runner)
        waiting = running(worker, "c", 2)  # for room
        await submitted(waiting)
        await worker.settled()
        before = num_looks
        await asyncio.sleep(0.05)
        assert num_looks <= before + 2  # those of the last message
        for number in range(3):
            await wait_until(lambda number=number: len(runner.flights) > number)
            runner.flights[number].land()
        await asyncio.gather(*tasks, waiting)


async def test_a_step_that_cannot_begin_takes_its_own_sessions_only() -> None:
    async with far_worker() as (worker, runner):
        kept = running(worker, "a", 0)
        await runner.wait_for([0])
        runner.refuses = True
        with pytest.raises(WorkerUnreachable, match="no stage is there"):
            await running(worker, "b", 1)
        runner.flights[0].land()
        assert (await kept)[0] == "a"


async def test_who_waits_for_room_and_is_cancelled_leaves_at_once() -> None:
    async with far_worker() as (worker, runner):
        others = await under_way(worker, runner)
        waiting = running(worker, "c", 2)
        await submitted(waiting)
        await worker.settled()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for flight, other, name in zip(runner.flights, others, "ab", strict=True):
            assert not other.done()
            flight.land()
            assert (await other)[0] == name
        assert runner.slots == [[0], [1]]


class SlowLink:
    """A link to stages that answer late, and the order in which packets came to it."""

    is_down = False

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.request_ids: list[int] = []

    async def send(self, packet: Packet) -> Packet:
        self.request_ids.append(packet.request_id)
        await asyncio.sleep(0)  # as a link that takes its time, and so lets others send
        return replace(packet, stage_from=self.num_stages - 1, stage_to=-1)


@pytest.mark.parametrize(("num_stages", "num_rows"), [(2, 1024), (3, 516), (4, 512)])
async def test_packets_of_waiting_steps_are_sent_step_by_step(num_stages: int, num_rows: int) -> None:
    link = SlowLink(num_stages)
    loop = asyncio.get_running_loop()
    runner = ChainRunner(link, loop, ChainShape(16, 8, 100, torch.float32), options=ChainOptions(window=2))

    def begin_all() -> list[PendingChainForward]:
        return [runner.begin([SequenceInput(slot, 0, [1] * num_rows)]) for slot in range(num_stages)]

    flights = await asyncio.to_thread(begin_all)
    await wait_until(lambda: all(flight.is_done for flight in flights))
    assert len(link.request_ids) > num_stages
    assert link.request_ids == sorted(link.request_ids)
