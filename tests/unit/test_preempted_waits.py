"""A preempted session keeps its place for as long as its client waits, which may be longer than its time to live."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsplit.core.errors import DeadlineExceeded, Overloaded, SlotBehind
from specsplit.core.types import Proposal, SessionParams, Turn, Verdict
from specsplit.engine.caller_limits import CallerLimits
from specsplit.engine.executor import LoopExecutor
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import hash_model
from tests.support.rounds import script
from tests.support.rpc_servers import wait_until
from tests.support.virtual_time import LoopClock, run_virtual

OLD, YOUNG = [5] * 190, [6] * 20


class LateClock:
    """Stands still until it is told how late it is."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s


def first(key: str, ids: list[int]) -> Turn:
    return script(SessionParams(), ids, 0, 1, key)


async def verified(target: TargetEngine, turn: Turn) -> Verdict:
    return await target.verify(turn, Proposal(1, turn.base_length + len(turn.tail) - 1))


async def test_a_session_that_waits_in_the_queue_outlives_its_time_to_live() -> None:
    clock = LateClock()
    model, _ = hash_model("target", max_sessions=4, context=200, row_limit=216)
    target = TargetEngine(model, ttl_s=60, clock=clock)
    target.open_queue(8)
    target.quotas.limit(CallerLimits(sessions=2))
    await verified(target, first("old", OLD[:6]))
    await verified(target, first("young", YOUNG))
    await verified(target, script(SessionParams(), OLD, 6, 2, "old"))  # for which the younger one has to go
    with pytest.raises(SlotBehind):
        await verified(target, script(SessionParams(), [*YOUNG, 7], 20, 2, "young"))
    waiting = asyncio.create_task(verified(target, first("young", YOUNG)))
    await wait_until(lambda: target.load.num_waiting == 1)
    for number in (3, 4, 5):
        clock.time_s += 40
        await verified(target, script(SessionParams(), OLD, 189, number, "old"))
        await target.sweep()
    assert target.num_sessions == 1
    with pytest.raises(Overloaded, match="2 sessions"), target.quotas.using(first("more", [8] * 4)):
        pass
    assert not waiting.done(), "it would only lose its rows again"
    await target.close("old")
    await waiting
    await target.close("young")
    target.check_integrity()
    await target.aclose()


async def test_who_comes_back_takes_no_idle_session_that_is_not_enough() -> None:
    clock = LateClock()
    model, _ = hash_model("target", max_sessions=4, context=200, row_limit=300)
    target = TargetEngine(model, ttl_s=1e6, clock=clock)
    target.open_queue(8)
    await verified(target, first("old", OLD[:6]))
    await verified(target, first("small", [9] * 3))
    await verified(target, first("young", [6] * 90))
    await verified(target, script(SessionParams(), OLD, 6, 2, "old"))  # for which the youngest one has to go
    clock.time_s = 8.0
    await verified(target, script(SessionParams(), OLD, 189, 3, "old"))  # so that only the small one is idle for long
    waiting = asyncio.create_task(verified(target, first("young", [6] * 150)))
    await wait_until(lambda: target.load.num_waiting == 1)
    assert (target.num_sessions, target.load.num_preempted) == (2, 1)
    await verified(target, script(SessionParams(), [9] * 4, 3, 2, "small"))
    assert not waiting.done()
    await target.close("old")
    await waiting
    await asyncio.gather(target.close("young"), target.close("small"))
    target.check_integrity()
    await target.aclose()


async def test_who_comes_back_may_take_an_idle_session_that_is_enough() -> None:
    clock = LateClock()
    model, _ = hash_model("target", max_sessions=4, context=200, row_limit=300)
    target = TargetEngine(model, ttl_s=1e6, clock=clock)
    await verified(target, first("old", OLD[:6]))
    await verified(target, first("idle", [9] * 40))
    await verified(target, first("young", [6] * 40))
    await verified(target, script(SessionParams(), OLD, 6, 2, "old"))
    clock.time_s = 8.0
    await verified(target, script(SessionParams(), OLD, 189, 3, "old"))
    with pytest.raises(SlotBehind):
        await verified(target, script(SessionParams(), [6] * 41, 40, 2, "young"))
    await verified(target, first("young", [6] * 41))
    assert target.num_sessions == 2
    with pytest.raises(SlotBehind):
        await verified(target, script(SessionParams(), [9] * 41, 40, 2, "idle"))
    await asyncio.gather(target.close("young"), target.close("old"))
    await target.aclose()


def test_the_longest_wait_of_one_call_costs_a_preempted_session_nothing() -> None:
    async def main() -> None:
        model, _ = hash_model("target", max_sessions=4, context=200, row_limit=216)
        target = TargetEngine(model, LoopExecutor(), ttl_s=1e6, grace_s=1e6, clock=LoopClock())
        target.open_queue(8)
        await verified(target, first("old", OLD[:6]))
        await verified(target, first("young", YOUNG))
        await verified(target, script(SessionParams(), OLD, 6, 2, "old"))
        waiting = asyncio.create_task(verified(target, first("young", YOUNG)))
        await asyncio.sleep(200)
        late = asyncio.create_task(verified(target, first("late", OLD[:150])))
        with pytest.raises(DeadlineExceeded, match="300 s"):
            await waiting
        await asyncio.sleep(15)  # a session that was never let in would have lost its place in the queue by now
        again = asyncio.create_task(verified(target, first("young", YOUNG)))
        await asyncio.sleep(1)
        assert not again.done()
        await target.close("old")
        await again
        assert not late.done(), "the one that was let in first goes first"
        await target.close("young")
        await late
        await target.close("late")
        await target.aclose()

    run_virtual(main)


def test_a_request_whose_own_time_is_over_loses_its_place() -> None:
    async def main() -> None:
        model, _ = hash_model("target", max_sessions=4, context=200, row_limit=216)
        target = TargetEngine(model, LoopExecutor(), ttl_s=1e6, grace_s=1e6, clock=LoopClock())
        target.quotas.limit(CallerLimits(sessions=2))
        await verified(target, first("old", OLD[:6]))
        await verified(target, first("young", YOUNG))
        await verified(target, script(SessionParams(), OLD, 6, 2, "old"))
        with pytest.raises(DeadlineExceeded):
            await verified(target, replace(first("young", YOUNG), max_wait_s=2.0))
        with target.quotas.using(first("more", [8] * 4)):
            pass
        await target.aclose()

    run_virtual(main)
