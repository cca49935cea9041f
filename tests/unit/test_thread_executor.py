"""The thread of an executor keeps to its own number of threads, whatever the rest of the process sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specsplit.engine.executor import ThreadExecutor


class Question:
    """Work of one step: an operator that is worth several threads, then how many it may use."""

    has_work = can_step = True
    wait_s = 0.0

    def __init__(self) -> None:
        self.answer: int | None = None
        self.is_answered = threading.Event()

    def step(self) -> None:
        torch.sin(torch.zeros(1 << 20))
        self.answer = torch.get_num_threads()
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
