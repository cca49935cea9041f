"""The queue before a worker's slots against a plain model, in virtual time: who is served next, and who is not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specsplit.core.errors import (
    DeadlineExceeded,
    NoFreeSlot,
    Overloaded,
    SpecSplitError,
    StaleRound,
    WorkerUnreachable,
)
from specsplit.core.progress import Progress, listening
from specsplit.core.types import Proposal, SessionParams
from specsplit.engine.admission import AGE_S, AdmissionQueue, FreedRate, Opening
from specsplit.engine.executor import LoopExecutor
from specsplit.limits import MAX_REFUSED_S, MIN_RETRY_S
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.request import RetryPolicy
from specsplit.orchestrator.retry import Retrier
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import hash_model
from tests.support.rounds import script
from tests.support.rpc_servers import wait_until
from tests.support.virtual_time import VirtualTimeLoop, run_virtual

NUM_SLOTS, NUM_PLACES = 2, 4


@dataclass
class Expected:
    """One that waits, in the model."""

    key: str
    caller: str
    rank: float
    end_s: float


class Slots:
    """So many slots, and what an engine does with the queue before them."""

    def __init__(self, num_slots: int, num_places: int) -> None:
        self.num_free = num_slots
        self.queue = AdmissionQueue(num_places)
        self.served: list[str] = []
        self.heard: dict[str, Progress] = {}
        self.ended: dict[str, SpecSplitError | None] = {}

    async def open(self, opening: Opening) -> None:
        if len(self.queue) or not await self.try_take():
            with listening(lambda progress: self.heard.__setitem__(opening.session, progress)):
                await self.queue.wait(opening, self.try_take)
        self.served.append(opening.session)

    async def try_take(self) -> bool:
        await asyncio.sleep(0)  # as the executor would answer
        if not self.num_free:
            return False
        self.num_free -= 1
        return True

    def free(self) -> None:
        self.num_free += 1
        self.queue.slot_freed()


class QueueMachine(RuleBasedStateMachine):
    """Arrivals, ends, cancels and time in any order; the model keeps sorted lists."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.slots = Slots(NUM_SLOTS, NUM_PLACES)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.waiting: list[Expected] = []
        self.num_held = 0
        self.order: list[str] = []

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.grant_turns()
        self.loop.run_until_complete(turns())

    @rule(priority=st.integers(0, 9), caller=st.sampled_from(["", "a", "b"]), wait_s=st.sampled_from([None, 3.0, 20.0]))
    def arrive(self, priority: int, caller: str, wait_s: float | None) -> None:
        key, now_s = f"s{len(self.tasks)}", self.loop.time()
        self.tasks[key] = self.loop.create_task(self.slots.open(Opening(key, caller, priority, wait_s)))
        self.settle()
        has_quota = not caller or sum(other.caller == caller for other in self.waiting) < NUM_PLACES // 2
        if self.num_held < NUM_SLOTS:
            self.num_held += 1
            self.order.append(key)
        elif len(self.waiting) < NUM_PLACES and has_quota:
            end_s = now_s + (wait_s if wait_s is not None else 300.0)
            self.waiting.append(Expected(key, caller, now_s - AGE_S * priority, end_s))
            self.waiting.sort(key=lambda one: one.rank)
        else:
            error = self.tasks[key].exception()
            assert isinstance(error, Overloaded)
            assert error.retry_after_s > 0

    @precondition(lambda self: self.num_held)
    @rule()
    def end_a_session(self) -> None:
        self.slots.free()
        self.settle()
        self.num_held -= 1
        if self.waiting:
            self.num_held += 1
            self.order.append(self.waiting.pop(0).key)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), closes=st.booleans())
    def vanish(self, data: st.DataObject, closes: bool) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        if closes:
            self.slots.queue.withdraw(one.key)
        else:
            self.tasks[one.key].cancel()
        self.settle()
        assert self.tasks[one.key].done()
        self.waiting.remove(one)

    @rule(seconds=st.sampled_from([0.1, 2.0, 15.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.grant_turns()
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.settle()
        for one in [one for one in self.waiting if one.end_s <= self.loop.time()]:
            assert isinstance(self.tasks[one.key].exception(), DeadlineExceeded)
            self.waiting.remove(one)

    @invariant()
    def the_queue_is_the_models(self) -> None:
        assert self.slots.served == self.order
        assert self.slots.num_free == NUM_SLOTS - self.num_held
        assert len(self.slots.queue) == len(self.waiting)
        heard = [self.slots.heard[one.key] for one in self.waiting]
        assert [progress.position for progress in heard] == list(range(1, len(self.waiting) + 1))

    def teardown(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        self.settle()
        for task in self.tasks.values():
            if not task.cancelled():
                task.exception()
        self.loop.close()


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_in_a_long_queue_a_freed_slot_is_heard_of_near_the_front_alone() -> None:
    num_waiting, heard = 300, list[Progress]()
    slots = Slots(1, num_waiting)

    async def main() -> None:
        await slots.open(Opening("first"))
        async with asyncio.TaskGroup() as tasks:
            with listening(heard.append):
                for number in range(num_waiting):
                    tasks.create_task(slots.queue.wait(Opening(f"s{number}"), slots.try_take))
            for _ in range(num_waiting):
                await asyncio.sleep(0.01)
                slots.free()
        assert asyncio.get_running_loop().time() < 1.01 * num_waiting * 0.01

    run_virtual(main)
    assert len(heard) < 20 * num_waiting


def test_a_steady_stream_of_urgent_requests_starves_nobody() -> None:
    async def main() -> list[str]:
        slots = Slots(NUM_SLOTS, NUM_PLACES)
        for key in ("first", "second"):
            await slots.open(Opening(key))
        tasks = [asyncio.create_task(slots.open(Opening("patient", priority=0)))]
        for number in range(200):  # one comes and one goes each second
            tasks.append(asyncio.create_task(slots.open(Opening(f"urgent {number}", priority=9))))
            await asyncio.sleep(1)
            slots.free()
        slots.free()
        await asyncio.gather(*tasks)
        return slots.served

    served = run_virtual(main)
    assert served.index("patient") == pytest.approx(9 * AGE_S, abs=5)


def test_background_work_waits_behind_all_others() -> None:
    async def main() -> list[str]:
        slots = Slots(1, 8)
        await slots.open(Opening("first"))
        openings = [Opening("score", priority=None), Opening("late", priority=0), Opening("later", priority=0)]
        tasks = [asyncio.create_task(slots.open(opening)) for opening in openings]
        for _ in tasks:
            await asyncio.sleep(100)
            slots.free()
        await asyncio.gather(*tasks)
        return slots.served

    assert run_virtual(main) == ["first", "late", "later", "score"]


def test_a_later_call_of_a_session_takes_the_place_of_its_first() -> None:
    async def main() -> list[str]:
        slots = Slots(NUM_SLOTS, NUM_PLACES)
        for key in ("first", "second"):
            await slots.open(Opening(key))
        lost = asyncio.create_task(slots.open(Opening("again")))
        await asyncio.sleep(1)
        other = asyncio.create_task(slots.open(Opening("other")))
        await asyncio.sleep(1)
        again = asyncio.create_task(slots.open(Opening("again")))
        await asyncio.sleep(1)
        assert "a later call" in str(lost.exception())
        slots.free()
        slots.free()
        await asyncio.gather(again, other)
        return slots.served

    assert run_virtual(main) == ["first", "second", "again", "other"]


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "drained"])
async def test_who_is_sent_away_keeps_no_slot_that_was_on_its_way(is_closed: bool) -> None:
    """The slot is tried for on the executor, a few turns of the loop later; whatever turn it is in, it comes back."""
    model, _ = hash_model("target", max_sessions=1, context=48)
    num_sent_away = 0
    for num_turns in range(12):
        target = TargetEngine(model, LoopExecutor())
        target.open_queue(4)
        params = SessionParams()
        await target.verify(script(params, [1, 2], 0, 1, "first"), Proposal(1, 1))
        waiting = asyncio.create_task(target.verify(script(params, [1, 2], 0, 1, "second"), Proposal(1, 1)))
        await wait_until(lambda target=target: target.load.num_waiting == 1)
        await target.close("first")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        is_waiting = target.load.num_waiting == 1
        if is_closed:
            await target.close("second")
        else:
            target.refuse_waiting(lambda: WorkerUnreachable("The worker is shutting down."))
        if is_waiting:
            num_sent_away += 1
            with pytest.raises((StaleRound, WorkerUnreachable)):
                await waiting
        else:
            await asyncio.gather(waiting, return_exceptions=True)
            await target.close("second")
        assert target.statistics().sessions.num_slots_used == 0
        await target.aclose()
    assert 0 < num_sent_away < 12, "some turns are before the slot is there, and some after"


def test_refused_callers_come_back_as_fast_as_slots_become_free() -> None:
    rate = FreedRate()
    for number in range(9):
        rate.observe(100 + number * 0.5)
    times = [rate.retry_after_s(104.5) for _ in range(5)]
    assert times == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])
    rate.forget_promises()
    assert rate.retry_after_s(104.5) == pytest.approx(0.5)
    assert rate.retry_after_s(104.5 + 60) == pytest.approx(0.5), "what was long ago says nothing"
    assert max(rate.retry_after_s(200) for _ in range(1000)) == pytest.approx(30)
    beyond = [rate.retry_after_s(200) for _ in range(1000)]
    assert min(beyond[60:]) == pytest.approx(15, abs=1), "nor do all who come late come at one moment"
    assert len({round(each, 1) for each in beyond[60:]}) > 20


async def test_slots_that_nobody_waits_for_say_nothing_of_the_pace() -> None:
    """A light load frees a slot whenever a request comes; a burst behind it has not to wait for that."""

    async def take() -> bool:
        return True

    queue = AdmissionQueue(1)
    for _ in range(4):
        await queue.wait(Opening("light"), take)
        queue.slot_freed()
        await asyncio.sleep(0.001)
    assert queue.overloaded("Try again.").retry_after_s == pytest.approx(0.5)


async def test_without_a_queue_the_pace_of_freed_slots_is_known() -> None:
    queue = AdmissionQueue(0)
    queue.overloaded("Try again.")
    for _ in range(4):
        queue.slot_freed()
    await asyncio.sleep(0.001)
    assert queue.overloaded("Try again.").retry_after_s < 0.55


def test_an_orchestrator_comes_back_when_it_was_told_to() -> None:
    async def main() -> tuple[list[float], float]:
        loop, asked_s = asyncio.get_running_loop(), list[float]()

        async def ask() -> None:
            asked_s.append(loop.time())
            if len(asked_s) <= 3:
                raise Overloaded("All sessions are in use.", 7.5)

        retrier = Retrier(60.0, RetryPolicy(), RequestEvents())
        await retrier.ask(ask)
        return asked_s, retrier.queue_s

    assert run_virtual(main) == ([0.0, 7.5, 15.0, 22.5], 22.5)


@pytest.mark.parametrize("limit", ["", "sessions", "tokens"])
def test_a_refusal_is_waited_out_beyond_the_time_for_retries(limit: str) -> None:
    async def main() -> list[float]:
        loop, asked_s = asyncio.get_running_loop(), list[float]()

        async def ask() -> None:
            asked_s.append(loop.time())
            if len(asked_s) <= 2:
                raise Overloaded("There is no room.", 20.0, limit)

        await Retrier(None, RetryPolicy(retry_s=5.0), RequestEvents()).ask(ask)
        return asked_s

    assert run_virtual(main) == [0.0, 20.0, 40.0]


def test_a_refusal_that_names_no_time_is_waited_out_all_the_same() -> None:
    """A peer's RetryInfo may be 0 s, or less: whoever believed it would ask without a pause."""

    async def main() -> tuple[list[float], list[Progress]]:
        loop, asked_s, heard = asyncio.get_running_loop(), list[float](), list[Progress]()

        async def ask() -> None:
            asked_s.append(loop.time())
            if len(asked_s) <= 4:
                raise Overloaded("All sessions are in use.", -1.0 if len(asked_s) % 2 else 0.0)

        with listening(heard.append):
            await Retrier(60.0, RetryPolicy(), RequestEvents()).ask(ask)
        return asked_s, heard

    asked_s, heard = run_virtual(main)
    assert asked_s == pytest.approx([number * MIN_RETRY_S for number in range(5)])
    assert heard == [Progress(retry_after_s=MIN_RETRY_S)] * 4


def test_who_is_always_refused_is_given_up_in_the_end() -> None:
    """Without a deadline, too: other requests may take the places, or the caller's tokens, for ever."""

    async def main() -> tuple[float, int]:
        loop, num_asked = asyncio.get_running_loop(), 0

        async def ask() -> None:
            nonlocal num_asked
            num_asked += 1
            raise Overloaded("There is no room.", 20.0)

        with pytest.raises(NoFreeSlot, match="asked again for 3600"):
            await Retrier(None, RetryPolicy(retry_s=5.0), RequestEvents()).ask(ask)
        return loop.time(), num_asked

    assert run_virtual(main) == (MAX_REFUSED_S, MAX_REFUSED_S / 20 + 1)


def test_progress_keeps_an_attempt_alive_and_reaches_the_listener() -> None:
    async def main() -> tuple[str, list[Progress]]:
        heard: list[Progress] = []

        async def ask() -> str:
            queue = AdmissionQueue(1)
            tries = iter([False] * 10_000)

            async def try_take() -> bool:
                return asyncio.get_running_loop().time() > 100 or next(tries)

            await queue.wait(Opening("a"), try_take)
            return "served"

        retrier = Retrier(None, RetryPolicy(retry_s=5.0), RequestEvents())
        with listening(heard.append):
            return await retrier.ask(ask, work_s=1.0), heard

    answer, heard = run_virtual(main)
    assert answer == "served"
    assert set(heard) == {Progress(queued=1, position=1)}
