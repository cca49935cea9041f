"""An executor keeps to its own number of threads, whatever the rest of the process sets, while it has work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from specsplit.engine.executor import LoopExecutor, ThreadExecutor
from specsplit.model.threads import end_team
from tests.support.rpc_servers import wait_until


def os_threads() -> set[str]:
    """Return the threads of this process as Linux numbers them."""
    return {thread.name for thread in Path("/proc/self/task").glob("*")}


class Question:
    """Work of one step: an operator that is worth several threads, then how many it may use."""

    has_work = can_step = True
    wait_s = 0.0

    def __init__(self) -> None:
        self.answer: int | None = None
        self.is_answered = threading.Event()
        self.threads: set[str] = set()
        """Those of the process behind the operator."""

    def step(self) -> None:
        torch.sin(torch.zeros(1 << 20))
        self.answer = torch.get_num_threads()
        self.threads = os_threads()
        self.has_work = self.can_step = False
        self.is_answered.set()

    def abandon(self) -> None: ...


def asked(executor: ThreadExecutor) -> int | None:
    question = Question()
    executor.submit(question, lambda: None)
    assert question.is_answered.wait(60)
    return question.answer


@contextmanager
def number_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 3])
async def test_an_engine_computes_with_its_own_number_of_threads(num_threads: int) -> None:
    with number_kept():
        executor, other = ThreadExecutor("one", num_threads), ThreadExecutor("other", 5)
        try:
            assert asked(other) == 5
            torch.set_num_threads(4)
            assert asked(executor) == num_threads
            assert asked(other) == 5
        finally:
            await executor.close()
            await other.close()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux lists them")
@pytest.mark.parametrize("kind", ["thread", "loop"])
async def test_a_team_ends_while_there_is_no_work_and_comes_back(kind: str) -> None:
    """libgomp's teams slow each other down, so an idle engine must not keep one."""
    with number_kept():
        end_team()  # other tests computed on this thread
        executor = ThreadExecutor("one", 3) if kind == "thread" else LoopExecutor(3)
        try:
            before = os_threads()
            for _ in range(2):
                question = Question()
                executor.submit(question, lambda: None)
                await wait_until(question.is_answered.is_set)
                assert question.answer == 3
                team = question.threads - before
                assert len(team) == 2
                await wait_until(lambda team=team: not team & os_threads())
        finally:
            await executor.close()


async def test_an_executor_closes_when_pools_take_no_more_work() -> None:
    """So it is in `atexit` callbacks."""
    pool, before = ThreadPoolExecutor(), set(threading.enumerate())
    pool.shutdown()
    asyncio.get_running_loop().set_default_executor(pool)
    executor = ThreadExecutor("one", 1)
    await executor.close()
    assert set(threading.enumerate()) <= before
    await executor.close()
