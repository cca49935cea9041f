"""The scheduler on a thread: who shares a batch, in which order, and what happens when one of them ends badly."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import WorkerClosed
from specsplit.engine.batch import Round, at_once
from specsplit.engine.scheduler import WorkQueue
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.runners import SteeredRunner, steered
from tests.support.works import Diary, queue_over_a_steered_runner, submitted

MAX_SESSIONS = 4
_models: list[LoadedModel] = []


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_model(tmp_path_factory.mktemp("worker"), FAMILIES["llama"](), seed=1, with_tokenizer=False)
    _models.append(load_model(str(folder), role="target", threads=1, max_sessions=MAX_SESSIONS, record=False))


def steered_queue() -> AbstractAsyncContextManager[tuple[WorkQueue, SteeredRunner]]:
    return queue_over_a_steered_runner(_models[0])


async def test_the_work_gets_its_logits_and_its_caller_the_result_with_timings() -> None:
    async with steered_queue() as (queue, runner):
        result, timings = await queue.run("a", Diary().work("a", 3))
    assert result == "a"
    assert (timings.num_forwards, timings.num_tokens, timings.batch_size) == (3, 3, 1)
    assert len(runner.steps) == 3


async def test_work_without_a_forward_needs_no_step() -> None:
    async with steered_queue() as (queue, runner):
        result, timings = await queue.run("a", Diary().work("a", 0))
    assert (result, timings.num_forwards, runner.steps) == ("a", 0, [])


async def test_sessions_that_wait_meet_in_one_step_and_leave_it_one_by_one() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            first = asyncio.create_task(queue.run("a", diary.work("a", 2)))
            await runner.wait_entered()
            others = [
                asyncio.create_task(queue.run(name, diary.work(name, slot, slot=slot)))
                for slot, name in enumerate("bcd", 1)
            ]
            await submitted(first, *others)
        outcomes = await asyncio.gather(first, *others)
    assert [[entry.slot for entry in step] for step in runner.steps] == [[0], [0, 1, 2, 3], [2, 3], [3]]
    assert [(result, timings.batch_size) for result, timings in outcomes] == [("a", 4), ("b", 4), ("c", 4), ("d", 4)]
    assert [timings.num_forwards for _, timings in outcomes] == [2, 1, 2, 3]


async def test_each_entry_of_a_common_step_gets_its_own_logits() -> None:
    def prefill(slot: int, token_ids: list[int]) -> Generator[SequenceInput, Tensor, Tensor]:
        return (yield SequenceInput(slot, 0, token_ids, num_logits=len(token_ids)))

    prompts = [[5, 9, 2], [7], [11, 3, 8, 1]]
    async with steered_queue() as (queue, runner):
        alone = [(await queue.run("x", prefill(slot, prompt)))[0] for slot, prompt in enumerate(prompts)]
        with runner.held():
            blocker = asyncio.create_task(queue.run("x", Diary().work("x", slot=3)))
            await runner.wait_entered()
            tasks = [
                asyncio.create_task(queue.run(str(slot), prefill(slot, prompt))) for slot, prompt in enumerate(prompts)
            ]
            await submitted(*tasks)
        await blocker
        together = [(await task)[0] for task in tasks]
    assert len(runner.steps[-1]) == 3
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


async def test_an_error_of_the_work_reaches_its_caller_only() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            first = asyncio.create_task(queue.run("a", diary.work("a", 3)))
            await runner.wait_entered()
            broken = asyncio.create_task(queue.run("b", diary.work("b", slot=1, error=ValueError("the work's own"))))
            await submitted(first, broken)
        with pytest.raises(ValueError, match="the work's own"):
            await broken
        assert (await first)[0] == "a"
        assert (await queue.run("b", diary.work("b again")))[0] == "b again"


async def test_work_that_cannot_even_begin_fails_alone() -> None:
    def nothing() -> str:
        raise LookupError("no such work")

    async with steered_queue() as (queue, _):
        with pytest.raises(LookupError, match="no such work"):
            await queue.run("a", at_once(nothing))
        assert (await queue.run("a", Diary().work("a")))[0] == "a"


async def test_a_step_that_fails_ends_all_who_shared_it_and_the_next_one_runs() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            blocker = asyncio.create_task(queue.run("x", diary.work("x", slot=3)))
            await runner.wait_entered()
            sharing = [
                asyncio.create_task(queue.run(name, diary.work(name, slot=slot))) for slot, name in enumerate("ab")
            ]
            waiting = asyncio.create_task(queue.run("a", diary.work("later"), Round(1, 1, "later")))
            await submitted(blocker, *sharing, waiting)
            runner.failures[len(runner.steps)] = RuntimeError("the device broke")
        assert (await blocker)[0] == "x"
        for task in sharing:
            with pytest.raises(RuntimeError, match="device broke"):
                await task
        assert (await waiting)[0] == "later"
    assert {"a hears that the device broke", "b hears that the device broke"} <= set(diary.lines)


async def test_cancelling_a_caller_ends_its_work_before_the_next_step() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            cancelled = asyncio.create_task(queue.run("a", diary.work("a", 5)))
            await runner.wait_entered()
            cancelled.cancel()
            await submitted(cancelled)  # it has not ended while its forward is under way
            follower = asyncio.create_task(queue.run("a", diary.work("follower")))
            await submitted(follower)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert "a is closed" in diary.lines, "once its caller is back, the work has let go of its session"
        assert (await follower)[0] == "follower"
    assert [line for line in diary.lines if line.startswith("a ")] == ["a begins", "a got logits", "a is closed"]
    assert len(runner.steps) == 2


async def test_a_cancelled_caller_does_not_disturb_those_in_its_step() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            blocker = asyncio.create_task(queue.run("x", diary.work("x", slot=3)))
            await runner.wait_entered()
            cancelled = asyncio.create_task(queue.run("a", diary.work("a", 9)))
            staying = asyncio.create_task(queue.run("b", diary.work("b", 9, slot=1)))
            await submitted(cancelled, staying)
            await runner.pass_one()
            cancelled.cancel()
            await submitted(cancelled, staying)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await staying)[1].num_forwards == 9
        assert (await blocker)[0] == "x"
    assert diary.lines.count("a got logits") < 9


async def test_closing_lets_what_runs_end_and_sends_away_what_waits_for_it() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            tasks = [
                asyncio.create_task(queue.run("a", diary.work("a", 3), Round(1, 1, "a"))),
                asyncio.create_task(queue.run("b", diary.work("b", 2, slot=1))),
            ]
            await runner.wait_entered()
            waiting = [
                asyncio.create_task(queue.run("a", diary.work("end"))),
                asyncio.create_task(queue.run("a", diary.work("waiting", 2), Round(1, 2, "waiting"))),
            ]
            closing = asyncio.create_task(queue.close())
            await submitted(closing, *tasks, *waiting)
        await closing
        assert [(await task)[0] for task in tasks] == ["a", "b"]
        for task in waiting:
            with pytest.raises(WorkerClosed):
                await task
        with pytest.raises(WorkerClosed):
            await queue.run("a", diary.work("too late"))
        assert queue.statistics().num_sessions == 0


async def test_the_event_loop_goes_on_while_a_forward_runs() -> None:
    async with steered_queue() as (queue, runner):
        enough = asyncio.Event()

        async def tick() -> None:
            for _ in range(100):
                await asyncio.sleep(0)
            enough.set()

        with runner.held():
            work = asyncio.create_task(queue.run("a", Diary().work("a")))
            await runner.wait_entered()
            ticking = asyncio.create_task(tick())
            await enough.wait()
            await submitted(work)
        await work
        await ticking


def test_a_worker_serves_one_event_loop_after_another() -> None:
    """As a Python caller may: each asyncio.run has its own loop, the worker and its thread stay."""
    loaded, _ = steered(_models[0])
    queue = WorkQueue(loaded.runner, name="tested")
    for name in "ab":
        assert asyncio.run(queue.run("a", Diary().work(name)))[0] == name
    asyncio.run(queue.close())
