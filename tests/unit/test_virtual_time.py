"""The virtual clock itself: it jumps, keeps the order of timers, and fails where a real one would hang."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.virtual_time import LoopClock, VirtualTimeError, run_virtual


def test_an_hour_passes_at_once_and_timers_keep_their_order() -> None:
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        order.append((name, LoopClock().now()))

    async def main() -> float:
        await asyncio.gather(sleeper("late", 3600.0), sleeper("early", 0.25), sleeper("also early", 0.25))
        return LoopClock().now()

    started_s = time.perf_counter()
    assert run_virtual(main) == 3600.0
    assert order == [("early", 0.25), ("also early", 0.25), ("late", 3600.0)]
    assert time.perf_counter() - started_s < 60


def test_time_stands_still_while_something_is_ready() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return LoopClock().now()

    assert run_virtual(main) == 0.0


def test_timeouts_run_on_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return LoopClock().now()

    assert run_virtual(main) == pytest.approx(30)


def test_a_deadlock_is_a_failure_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualTimeError, match="deadlock at 0"):
        run_virtual(main)


def test_a_run_without_end_is_a_failure_and_not_a_hang() -> None:
    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(1)

    with pytest.raises(VirtualTimeError, match="no end after 500 turns"):
        run_virtual(main, max_turns=500)


def test_tasks_left_behind_are_a_failure() -> None:
    async def main() -> None:
        asyncio.get_running_loop().create_task(asyncio.sleep(5), name="forgotten")
        await asyncio.sleep(1)

    with pytest.raises(VirtualTimeError, match="left behind: forgotten"):
        run_virtual(main)


def test_a_thread_is_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(VirtualTimeError, match="thread"):
        run_virtual(main)


def test_what_main_raises_comes_out() -> None:
    async def main() -> None:
        asyncio.get_running_loop().create_task(asyncio.Event().wait())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main)
