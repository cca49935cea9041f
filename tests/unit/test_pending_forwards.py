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
from specsplit.core.exactness import Exactness
from specsplit.engine.batch import at_once
from specsplit.engine.executor import LoopExecutor
from specsplit.engine.scheduler import Scheduler, WorkQueue
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.runner import Runner
from specsplit.stages.chain.runner import ChainOptions, ChainRunner, ChainShape, PendingChainForward
from specsplit.stages.packet import Packet
from tests.support.rpc_servers import wait_until
from tests.support.works import Diary, submitted


class FarForward:
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
        self.forwards: list[FarForward] = []
        self.is_far = True
        """Whether what begins is under way until a test lets it land."""
        self.refuses = False

    @property
    def max_pending(self) -> int:
        return self._max_pending

    def begin(self, entries: Sequence[SequenceInput]) -> FarForward:
        if self.refuses:
            raise WorkerUnreachable("no stage is there")
        self.forwards.append(FarForward(entries))
        if not self.is_far:
            self.forwards[-1].land()
        return self.forwards[-1]

    @property
    def slots(self) -> list[list[int]]:
        return [forward.slots for forward in self.forwards]

    async def wait_for(self, *slots: list[int]) -> None:
        """Wait until these steps have begun, in this order."""
        await wait_until(lambda: len(self.forwards) >= len(slots))
        assert self.slots == list(slots)


class FarQueue(WorkQueue):
    """The work of a runner whose forwards are computed elsewhere; `close` ends its executor, whichever it is."""

    async def close(self) -> None:
        await super().close()
        await self._executor.close()

    async def settled(self) -> None:
        """Wait until the device has done all that it was told before: it takes messages and steps in order."""
        await self.run(None, at_once(lambda: None))


_is_on_loop = False


@pytest.fixture(autouse=True, params=["thread", "loop"])
def driven_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with a thread and with the event loop that drives the queue."""
    monkeypatch.setattr(f"{__name__}._is_on_loop", request.param == "loop")


@asynccontextmanager
async def far_queue(max_pending: int = 2) -> AsyncIterator[tuple[FarQueue, FarRunner]]:
    runner, executor = FarRunner(max_pending), LoopExecutor(1) if _is_on_loop else None
    queue = FarQueue(runner, name="far", threads=1, executor=executor)
    try:
        yield queue, runner
    finally:
        runner.is_far = False
        for forward in runner.forwards:
            forward.land()
        await queue.close()


async def under_way(queue: FarQueue, runner: FarRunner) -> tuple[asyncio.Task[object], asyncio.Task[object]]:
    """Return two sessions, a in slot 0 and b in slot 1, each with a step of its own under way."""
    first = running(queue, "a", 0)
    await runner.wait_for([0])
    second = running(queue, "b", 1)
    await runner.wait_for([0], [1])
    return first, second


def running(queue: FarQueue, name: str, slot: int, num_forwards: int = 1) -> asyncio.Task[object]:
    return asyncio.create_task(queue.run(name, Diary().work(name, num_forwards, slot=slot)))


async def test_a_second_session_is_sent_beside_the_first_and_may_overtake() -> None:
    async with far_queue() as (queue, runner):
        first, second = await under_way(queue, runner)
        runner.forwards[1].land()
        assert (await second)[0] == "b"
        assert not first.done()
        runner.forwards[0].land()
        _, timings = await first
        assert (timings.num_forwards, timings.batch_size) == (1, 1)


async def test_waiting_sessions_share_a_step_when_the_runner_has_room() -> None:
    async with far_queue() as (queue, runner):
        early = await under_way(queue, runner)
        late = [running(queue, name, slot) for slot, name in enumerate("cd", 2)]
        await submitted(*late)
        await queue.settled()
        assert runner.slots == [[0], [1]]
        await asyncio.sleep(0.05)
        runner.forwards[0].land()
        await runner.wait_for([0], [1], [2, 3])
        for forward in runner.forwards[1:]:
            forward.land()
        assert [(await task)[0] for task in (*early, *late)] == list("abcd")
        _, timings = await late[0]
        assert timings.batch_size == 2
        assert timings.queue_ms >= 50
        assert timings.queue_ms + timings.device_ms <= timings.wall_ms


async def test_a_step_that_is_lost_takes_its_own_sessions_only() -> None:
    async with far_queue() as (queue, runner):
        lost, kept = await under_way(queue, runner)
        runner.forwards[0].future.set_exception(WorkerUnreachable("a stage is lost"))
        with pytest.raises(WorkerUnreachable, match="a stage is lost"):
            await lost
        again = running(queue, "a", 0)
        await wait_until(lambda: len(runner.forwards) == 3)
        runner.forwards[2].land()
        assert (await again)[0] == "a"
        runner.forwards[1].land()
        assert (await kept)[0] == "b"
        assert queue.is_well


async def test_closing_waits_for_what_is_under_way() -> None:
    async with far_queue() as (queue, runner):
        task = running(queue, "a", 0)
        await runner.wait_for([0])
        await queue.settled()
        closing = asyncio.create_task(queue.close())
        await submitted(closing)
        runner.forwards[0].land()
        await closing
        assert (await task)[0] == "a"


async def test_a_cancelled_caller_leaves_once_its_step_has_landed() -> None:
    async with far_queue() as (queue, runner):
        task = running(queue, "a", 0, num_forwards=5)
        await runner.wait_for([0])
        task.cancel()
        await asyncio.sleep(0)
        await queue.settled()
        assert not task.done()
        runner.forwards[0].land()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runner.slots == [[0]]
        assert not queue.statistics().has_work


async def test_a_step_that_goes_out_again_holds_up_nobody() -> None:
    async with far_queue() as (queue, runner):
        again, other = await under_way(queue, runner)
        runner.forwards[0].go_out_again()
        await wait_until(lambda: not runner.forwards[0].goes_again)
        await queue.settled()
        assert not again.done()
        runner.forwards[1].land()
        assert (await other)[0] == "b"
        third = running(queue, "c", 2)
        await runner.wait_for([0], [1], [2])
        runner.forwards[2].land()
        assert (await third)[0] == "c"
        runner.forwards[0].land()
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
    async with far_queue() as (queue, runner):
        tasks = await under_way(queue, runner)
        waiting = running(queue, "c", 2)  # for room
        await submitted(waiting)
        await queue.settled()
        before = num_looks
        await asyncio.sleep(0.05)
        assert num_looks <= before + 2  # those of the last message
        for number in range(3):
            await wait_until(lambda number=number: len(runner.forwards) > number)
            runner.forwards[number].land()
        await asyncio.gather(*tasks, waiting)


async def test_a_step_that_cannot_begin_takes_its_own_sessions_only() -> None:
    async with far_queue() as (queue, runner):
        kept = running(queue, "a", 0)
        await runner.wait_for([0])
        runner.refuses = True
        with pytest.raises(WorkerUnreachable, match="no stage is there"):
            await running(queue, "b", 1)
        runner.forwards[0].land()
        assert (await kept)[0] == "a"


async def test_who_waits_for_room_and_is_cancelled_leaves_at_once() -> None:
    async with far_queue() as (queue, runner):
        others = await under_way(queue, runner)
        waiting = running(queue, "c", 2)
        await submitted(waiting)
        await queue.settled()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for forward, other, name in zip(runner.forwards, others, "ab", strict=True):
            assert not other.done()
            forward.land()
            assert (await other)[0] == name
        assert runner.slots == [[0], [1]]


class SlowLink:
    """A link to stages that answer late, and the order in which packets came to it."""

    is_down = False
    exactness: Exactness = "near ties"
    numerics = ""
    revision = 0

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
    runner = ChainRunner(link, loop, ChainShape(16, 8, 100, torch.float32, 2048), options=ChainOptions(window=2))

    def begin_all() -> list[PendingChainForward]:
        return [runner.begin([SequenceInput(slot, 0, [1] * num_rows)]) for slot in range(num_stages)]

    forwards = begin_all() if _is_on_loop else await asyncio.to_thread(begin_all)
    await wait_until(lambda: all(forward.is_done for forward in forwards))
    assert len(link.request_ids) > num_stages
    assert link.request_ids == sorted(link.request_ids)


async def test_a_packet_that_is_alone_does_not_overtake_those_before_it() -> None:
    link = SlowLink(2)
    loop = asyncio.get_running_loop()
    runner = ChainRunner(link, loop, ChainShape(16, 8, 100, torch.float32, 2048))

    def begin_all() -> list[PendingChainForward]:
        steps = enumerate((300, 1, 200, 1))
        return [runner.begin([SequenceInput(slot, 0, [1] * num_rows)]) for slot, num_rows in steps]

    forwards = begin_all() if _is_on_loop else await asyncio.to_thread(begin_all)
    await wait_until(lambda: all(forward.is_done for forward in forwards))
    assert link.request_ids == sorted(link.request_ids)
    assert len(link.request_ids) == 3 + 1 + 2 + 1
