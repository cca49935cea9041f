"""Requests over workers with few slots: they begin by priority and arrival, and whatever ends one frees its turn."""

from __future__ import annotations

import asyncio

import pytest

from specsplit.assembly.requests import make_request, request_settings
from specsplit.assembly.workers import Placement, Workers
from specsplit.core.defaults import DEFAULT_PRIORITY
from specsplit.core.errors import ContextExceeded, InvalidSettings
from specsplit.core.sections import OrchestratorSettings
from specsplit.orchestrator.request import Request
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.virtual_time import run_virtual

PLAIN = OrchestratorSettings(mode="plain")


def request(number: int, priority: int = 5) -> Request:
    return Request(prompt_ids=(number + 1,), max_new_tokens=3, seed=1, ignore_eos=True, priority=priority)


class Arrivals:
    """Requests over workers that have room for `max_requests`, in the order in which they began."""

    def __init__(self, max_requests: int | None, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
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
            await asyncio.sleep(self.pause_s)


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


async def test_the_more_urgent_begin_first_then_those_who_came_first() -> None:
    arrivals = Arrivals(1)
    tasks = [asyncio.create_task(arrivals.run(0))]
    for number, priority in enumerate((0, 5, 9, 5, 9), 1):
        tasks.append(asyncio.create_task(arrivals.run(number, request(number, priority))))
    await asyncio.gather(*tasks)
    assert arrivals.begun == [0, 3, 5, 2, 4, 1]


def test_urgent_requests_without_end_starve_nobody() -> None:
    async def main() -> list[int]:
        arrivals = Arrivals(1, pause_s=1.0)
        tasks = [asyncio.create_task(arrivals.run(0)), asyncio.create_task(arrivals.run(1, request(1, 0)))]
        for number in range(2, 50):
            tasks.append(asyncio.create_task(arrivals.run(number, request(number, 9))))
            await asyncio.sleep(3)
        await asyncio.gather(*tasks)
        return arrivals.begun

    # Nine levels outweigh 90 seconds, in which thirty came.
    assert run_virtual(main).index(1) == 31


def test_the_option_of_a_request_says_how_urgent_it_is() -> None:
    settings = request_settings(OrchestratorSettings(), {"priority": 9})
    made = make_request(FakeTokenizer(), "x", settings)
    assert (made.priority, make_request(FakeTokenizer(), "x", OrchestratorSettings()).priority) == (9, DEFAULT_PRIORITY)
    with pytest.raises(InvalidSettings, match="priority"):
        request_settings(OrchestratorSettings(), {"priority": 10})
