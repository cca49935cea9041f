"""Whose turn it is before a worker's slots when somebody waits for long, comes again, or may not wait at all."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsplit.core.errors import DeadlineExceeded
from specsplit.core.types import Proposal, SessionParams
from specsplit.engine.admission import AdmissionQueue, Opening
from specsplit.engine.executor import LoopExecutor
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.request import RetryPolicy
from specsplit.orchestrator.retry import Retrier
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import hash_model
from tests.support.rounds import script
from tests.support.rpc_servers import wait_until
from tests.support.virtual_time import run_virtual
from tests.unit.test_admission import NUM_PLACES, Slots
from tests.unit.test_preempted_waits import LateClock


async def test_an_opening_that_may_not_wait_goes_before_a_score_that_does() -> None:
    clock, params = LateClock(), SessionParams()
    model, _ = hash_model("target", max_sessions=1, context=48)
    target = TargetEngine(model, LoopExecutor(), clock=clock)
    target.open_queue(4)
    await target.verify(script(params, [1, 2], 0, 1, "idle"), Proposal(1, 1))
    scoring = asyncio.create_task(target.score([1, 2], [3]))
    await wait_until(lambda: target.load.num_waiting == 1)
    clock.time_s = 10.0
    turn = replace(script(params, [1, 2], 0, 1, "audit"), max_wait_s=0.0)
    await target.verify(turn, Proposal(1, 1))
    assert not scoring.done()
    await target.close("audit")
    await scoring
    await target.aclose()


def test_who_comes_again_after_the_longest_wait_keeps_its_place() -> None:
    async def main() -> list[str]:
        slots = Slots(1, NUM_PLACES)
        await slots.open(Opening("first"))
        patient = asyncio.create_task(slots.open(Opening("patient")))
        await asyncio.sleep(1)
        late = [asyncio.create_task(slots.open(Opening(f"late {number}"))) for number in range(NUM_PLACES - 1)]
        with pytest.raises(DeadlineExceeded, match="within the 300 s"):
            await patient
        late.append(asyncio.create_task(slots.open(Opening("last"))))
        await asyncio.sleep(0.1)
        again = asyncio.create_task(slots.open(Opening("patient")))
        for _ in (again, *late):
            await asyncio.sleep(0)
            slots.free()
        await asyncio.gather(again, *late, return_exceptions=True)
        return slots.served

    assert run_virtual(main)[:2] == ["first", "patient"]


def test_a_request_without_a_deadline_waits_for_as_long_as_it_moves_up() -> None:
    async def main() -> float:
        loop, queue = asyncio.get_running_loop(), AdmissionQueue(1)

        async def try_take() -> bool:
            return loop.time() > 1000

        async def ask() -> None:
            await queue.wait(Opening("a"), try_take)

        await Retrier(None, RetryPolicy(retry_s=30.0), RequestEvents()).ask(ask)
        return loop.time()

    assert run_virtual(main) == pytest.approx(1000, abs=1)


@pytest.mark.parametrize(("max_wait_s", "is_served"), [(None, True), (410.0, True), (403.0, False)])
def test_time_in_which_an_opening_did_not_wait_is_no_wait(max_wait_s: float | None, is_served: bool) -> None:
    """A long prefill before a preemption counts for its place, and for its request's deadline."""

    async def main() -> None:
        loop, queue = asyncio.get_running_loop(), AdmissionQueue(1)
        await asyncio.sleep(400)

        async def try_take() -> bool:
            return loop.time() >= 405

        waiting = queue.wait(Opening("a", max_wait_s=max_wait_s), try_take, arrived_s=0.0)
        if is_served:
            assert await waiting == pytest.approx(5, abs=0.5)
        else:
            with pytest.raises(DeadlineExceeded):
                await waiting
            assert loop.time() == pytest.approx(403)

    run_virtual(main)
