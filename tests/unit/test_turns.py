"""Requests over workers with few slots: they begin in order of arrival, and whatever ends one frees its turn."""

from __future__ import annotations

import asyncio

import pytest

from specsplit.assembly.workers import Placement, Workers
from specsplit.core.errors import ContextExceeded
from specsplit.core.sections import OrchestratorSettings
from specsplit.orchestrator.request import Request
from tests.support.fakes import FakeTarget, FakeTokenizer

PLAIN = OrchestratorSettings(mode="plain")


def request(number: int) -> Request:
    return Request(prompt_ids=(number + 1,), max_new_tokens=3, seed=1, ignore_eos=True)


class Arrivals:
    """Requests over workers that have room for `max_requests`, in the order in which they began."""

    def __init__(self, max_requests: int | None) -> None:
        self.target = FakeTarget(context=32)
        self.workers = Workers(self.target, None, FakeTokenizer(), Placement(max_requests=max_requests))
        self.begun: list[int] = []
        self.most_at_once = 0

    async def run(self, number: int, wanted: Request | None = None) -> None:
        is_first = True
        async for _ in self.workers.stream(wanted or request(number), PLAIN):
            self.most_at_once = max(self.most_at_once, len(self.target.slots))
            if is_first:
                self.begun.append(number)
                is_first = False
            await asyncio.sleep(0)


@pytest.mark.parametrize(("max_requests", "most_at_once"), [(1, 1), (3, 3), (None, 9)])
async def test_requests_begin_in_order_of_arrival_as_there_are_slots(
    max_requests: int | None, most_at_once: int
) -> None:
    arrivals = Arrivals(max_requests)
    await asyncio.gather(*(arrivals.run(number) for number in range(9)))
    assert arrivals.begun == list(range(9))
    assert arrivals.most_at_once == most_at_once


async def test_a_request_that_fails_or_is_cancelled_gives_its_turn_to_the_next() -> None:
    arrivals = Arrivals(1)
    tasks = [
        asyncio.create_task(arrivals.run(0)),
        asyncio.create_task(arrivals.run(1, Request(prompt_ids=(1,) * 99))),
        asyncio.create_task(arrivals.run(2)),
        asyncio.create_task(arrivals.run(3)),
    ]
    while not arrivals.begun:  # noqa: ASYNC110 - the first request says so
        await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[2].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [
        asyncio.CancelledError,
        ContextExceeded,
        asyncio.CancelledError,
        type(None),
    ]
    assert arrivals.begun == [0, 3]
    assert not arrivals.target.slots
