"""Rows that sessions give up for others: idle ones before those at work, and nobody for an opening that cannot fit."""

from __future__ import annotations

import pytest

from specsplit.core.errors import Overloaded, SlotBehind
from tests.unit import test_preemption
from tests.unit.test_preempted_waits import LateClock
from tests.unit.test_preemption import Client, crowded

short_headroom = test_preemption.short_headroom


async def test_an_idle_session_goes_before_one_at_work():
    clock = LateClock()
    async with crowded(64, clock) as target:
        idle, old, young = (Client(target, "i" * number, 6) for number in (1, 2, 3))
        await idle.step()
        clock.time_s = 10.0
        await old.step()
        await young.step()
        await old.steps(30)
        await young.step()
        assert target.statistics().memory.num_preempted == 0
        with pytest.raises(SlotBehind):
            await idle.step()
        for client in (idle, old, young):
            await client.close()


async def test_an_opening_that_cannot_fit_takes_nothing_from_anybody():
    clock = LateClock()
    async with crowded(64, clock) as target:
        idle, ended, busy, large, small = (
            Client(target, "l" * number, length) for number, length in enumerate((4, 20, 6, 34, 26), 1)
        )
        await idle.step()
        clock.time_s = 10.0
        await ended.step()
        await ended.close()
        await busy.step()
        with pytest.raises(Overloaded, match="needs 48 KV rows more, and 16 of this worker's 64 are in use"):
            await large.step(max_wait_s=0)
        assert target.statistics().sessions.num_slots_warm == 1
        assert target.num_sessions == 2
        await small.step(max_wait_s=0)
        assert target.statistics().sessions.num_slots_warm == 0
        assert target.num_sessions == 2, "the idle one made room"
        for client in (idle, busy, small):
            await client.close()
