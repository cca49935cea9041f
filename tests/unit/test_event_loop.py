"""The loop of our own threads is never early, whatever the fraction of a millisecond and whatever held it up."""

from __future__ import annotations

import asyncio
import time

import pytest

from specsplit.engine import event_loop

HELD_UP_S = 0.02


async def test_a_loop_that_was_held_up_tells_the_time_that_has_passed():
    async def told() -> float:
        began_s = asyncio.get_running_loop().time()
        time.sleep(HELD_UP_S)  # noqa: ASYNC251 - as a forward does
        return asyncio.get_running_loop().time() - began_s

    assert await asyncio.to_thread(event_loop.run, told()) >= HELD_UP_S


async def test_a_timer_set_after_a_hold_up_does_not_go_off_early():
    async def waited() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        time.sleep(HELD_UP_S)  # noqa: ASYNC251
        began_s = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout_at(began_s + HELD_UP_S):
                await asyncio.Event().wait()
        return loop.time() - began_s

    assert await asyncio.to_thread(event_loop.run, waited()) >= HELD_UP_S


@pytest.mark.parametrize("sets", ["call_later", "call_at"])
async def test_no_timer_goes_off_before_its_time(sets: str):
    async def earliest() -> float:
        loop, left_s = asyncio.get_running_loop(), list[float]()
        delays_s = [0.0001 + 0.00037 * number for number in range(150)]
        for delay_s in delays_s:
            due_s = loop.time() + delay_s

            def goes_off(due_s: float = due_s) -> None:
                left_s.append(due_s - loop.time())

            if sets == "call_at":
                loop.call_at(due_s, goes_off)
            else:
                loop.call_later(delay_s, goes_off)
            await asyncio.sleep(0)
        await asyncio.sleep(delays_s[-1] + 0.01)
        assert len(left_s) == len(delays_s)
        return max(left_s)

    assert await asyncio.to_thread(event_loop.run, earliest()) <= 0


async def test_a_timer_in_the_far_future_can_be_set_and_cancelled():
    async def cancelled() -> bool:
        handle = asyncio.get_running_loop().call_later(1e9, lambda: None)
        handle.cancel()
        return handle.cancelled()

    assert await asyncio.to_thread(event_loop.run, cancelled())


def test_a_runner_keeps_its_loop_from_one_call_to_the_next():
    async def here() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with event_loop.runner() as runner:
        assert runner.run(here()) is runner.run(here())
