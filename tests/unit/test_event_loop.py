"""The loop of our own threads keeps asyncio's promises on time, also after a forward has held it up."""

from __future__ import annotations

import asyncio
import time

import pytest

from specsplit.core import event_loop

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

    # Timers have the resolution of a millisecond.
    assert await asyncio.to_thread(event_loop.run, waited()) >= HELD_UP_S - 0.001


def test_a_runner_keeps_its_loop_from_one_call_to_the_next():
    async def here() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with event_loop.runner() as runner:
        assert runner.run(here()) is runner.run(here())
