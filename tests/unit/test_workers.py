"""Workers that are shared by requests of many settings: what is kept for each of them, and how all of it ends."""

from __future__ import annotations

import asyncio
import gc

import pytest

from specsplit.assembly.workers import Placement, Workers
from specsplit.core.errors import WorkerClosed
from specsplit.core.sections import OrchestratorSettings
from specsplit.orchestrator.closings import CLOSE_S
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.virtual_time import run_virtual

REQUEST = Request(prompt_ids=(1,), max_new_tokens=2, seed=1, ignore_eos=True)
PLAIN = OrchestratorSettings(mode="plain")


class StuckTarget(FakeTarget):
    """It generates, and never answers that a slot is free."""

    num_closing = 0

    async def close(self, session: str) -> None:
        self.num_closing += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_closing -= 1


async def finish(workers: Workers, **settings: object) -> None:
    async for _ in workers.stream(REQUEST, PLAIN.model_copy(update=settings)):
        pass


async def test_times_of_a_request_are_its_own_and_nothing_is_kept_for_them() -> None:
    workers = Workers(FakeTarget(), None, FakeTokenizer(), Placement(is_remote=True))
    for number in range(20):
        times = {"retry": 5 + number / 100, "draft_patience": 1 + number, "timeout": 60 + number}
        policy = workers.orchestrator(PLAIN.model_copy(update=times)).retry_policy
        assert (policy.retry_s, policy.draft_s, policy.timeout_s) == tuple(times.values())
        await finish(workers, **times)
    gc.collect()
    assert sum(type(each) is Orchestrator and each.tokenizer is workers.tokenizer for each in gc.get_objects()) == 1


def test_closing_ends_the_late_closes_of_all_settings_at_once() -> None:
    async def main() -> None:
        target = StuckTarget()
        workers = Workers(target, None, FakeTokenizer())
        for nodes in (1, 2, 3):
            await finish(workers, nodes=nodes, retry=nodes)
        assert target.num_closing == 3
        began_s = asyncio.get_running_loop().time()
        await workers.aclose()
        assert target.num_closing == 0
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(CLOSE_S)

    run_virtual(main)


def test_requests_that_come_while_workers_are_closing_are_refused() -> None:
    async def main() -> None:
        workers = Workers(StuckTarget(), None, FakeTokenizer())
        await finish(workers, nodes=1)
        closing = asyncio.create_task(workers.aclose())
        await asyncio.sleep(CLOSE_S / 2)
        for nodes in (1, 2):
            with pytest.raises(WorkerClosed):
                await finish(workers, nodes=nodes)
        await closing

    run_virtual(main)
