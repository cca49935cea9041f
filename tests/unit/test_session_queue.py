"""Of one session, one piece of work runs and one round and one end wait; repeats join, and the rest is told at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from specsplit.core.errors import InvalidRequest, StaleEpoch, StaleRound
from specsplit.engine.batch import MAX_CALLERS, Round, at_once
from specsplit.engine.scheduler import WorkQueue
from specsplit.model.loader import LoadedModel, load_model
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.runners import SteeredRunner
from tests.support.works import Diary, queue_over_a_steered_runner, submitted

MAX_SESSIONS = 3
_models: list[LoadedModel] = []


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_model(tmp_path_factory.mktemp("admission"), FAMILIES["llama"](), seed=1, with_tokenizer=False)
    _models.append(load_model(str(folder), role="target", threads=1, max_sessions=MAX_SESSIONS, record=False))


def steered_queue() -> AbstractAsyncContextManager[tuple[WorkQueue, SteeredRunner]]:
    return queue_over_a_steered_runner(_models[0])


async def test_a_newer_round_runs_when_the_one_before_has_ended() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            first = asyncio.create_task(queue.run("a", diary.work("x", 2), Round(1, 1, "x")))
            await runner.wait_entered()
            second = asyncio.create_task(queue.run("a", diary.work("y", 2), Round(1, 2, "y")))
            await submitted(first, second)
            assert diary.lines == ["x begins"]
        assert [(await first)[0], (await second)[0]] == ["x", "y"]
        assert queue.statistics().num_sessions == 0
    assert diary.lines == [line for name in "xy" for line in (f"{name} begins", *[f"{name} got logits"] * 2)]
    assert [len(step) for step in runner.steps] == [1] * 4


async def test_a_round_cancelled_while_it_waits_leaves_no_trace() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            running = asyncio.create_task(queue.run("a", diary.work("running", 2), Round(1, 1, "running")))
            await runner.wait_entered()
            cancelled = asyncio.create_task(queue.run("a", diary.work("cancelled", 2), Round(1, 3, "cancelled")))
            await submitted(running, cancelled)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            last = asyncio.create_task(queue.run("a", diary.work("last"), Round(1, 2, "last")))
            await submitted(running, last)
        assert [(await running)[0], (await last)[0]] == ["running", "last"]
        assert queue.statistics().num_sessions == 0
    assert not any(line.startswith("cancelled") for line in diary.lines)
    assert len(runner.steps) == 3


@asynccontextmanager
async def round_five_is_running() -> AsyncIterator[tuple[WorkQueue, Diary, asyncio.Task[object]]]:
    """Give a worker in whose session "a" round 5 of epoch 2 is held until the block is left; wait for what follows."""
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            running = asyncio.create_task(queue.run("a", diary.work("5"), Round(2, 5, "5")))
            await runner.wait_entered()
            yield queue, diary, running
        assert (await running)[0] == "5"  # type: ignore[index]
        async with asyncio.timeout(60):
            while queue.statistics().num_sessions:
                await queue.run(None, at_once(lambda: None))


async def test_of_many_newer_rounds_the_last_runs_and_the_others_are_stale() -> None:
    async with round_five_is_running() as (queue, diary, running):
        rounds = [
            asyncio.create_task(queue.run("a", diary.work(f"{number}"), Round(2, number, number)))
            for number in range(6, 206)
        ]
        await submitted(running)
        *superseded, last = rounds
        for number, task in enumerate(superseded, 6):
            with pytest.raises(StaleRound, match=f"round {number} was superseded by round {number + 1}"):
                await task
    assert (await last)[0] == "205"
    assert [line for line in diary.lines if "begins" in line] == ["5 begins", "205 begins"]


async def test_repeats_join_what_runs_and_what_waits() -> None:
    async with round_five_is_running() as (queue, diary, running):
        waiting = [
            asyncio.create_task(queue.run("a", diary.work(name), Round(2, 6, "six"))) for name in ("6", "6 again")
        ]
        await submitted(*waiting)
        repeats = [asyncio.create_task(queue.run("a", diary.work("5 again"), Round(2, 5, "5"))) for _ in range(3)]
        await submitted(running, *repeats)
    assert await asyncio.gather(*repeats) == [await running] * 3
    assert (await waiting[0])[0] == "6"
    assert await waiting[0] == await waiting[1]
    assert [line for line in diary.lines if "begins" in line] == ["5 begins", "6 begins"]


async def test_of_a_flood_of_repeats_the_newest_stay() -> None:
    async with round_five_is_running() as (queue, diary, running):
        waiting = [asyncio.create_task(queue.run("a", diary.work("6"), Round(2, 6, "six"))) for _ in range(100)]
        await submitted(running)
        outcomes = asyncio.gather(*waiting, return_exceptions=True)
    await running
    kinds = [type(outcome) for outcome in await outcomes]
    assert kinds == [StaleRound] * (100 - MAX_CALLERS) + [tuple] * MAX_CALLERS


async def test_a_round_goes_on_while_one_of_its_callers_waits() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            first = asyncio.create_task(queue.run("a", diary.work("a", 3), Round(1, 1, "a")))
            await runner.wait_entered()
            repeat = asyncio.create_task(queue.run("a", diary.work("repeat"), Round(1, 1, "a")))
            await submitted(first, repeat)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        assert (await repeat)[0] == "a"
    assert len(runner.steps) == 3


async def test_a_round_whose_callers_have_all_left_is_not_joined_but_done_again() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            left = asyncio.create_task(queue.run("a", diary.work("a", 3), Round(1, 1, "a")))
            await runner.wait_entered()
            left.cancel()
            await submitted(left)
            repeat = asyncio.create_task(queue.run("a", diary.work("repeat"), Round(1, 1, "a")))
            await submitted(left, repeat)
        with pytest.raises(asyncio.CancelledError):
            await left
        assert (await repeat)[0] == "repeat"
        assert queue.statistics().num_sessions == 0


async def test_what_is_older_or_other_than_the_running_round_is_refused_at_once() -> None:
    async with round_five_is_running() as (queue, diary, running):
        for this_round, error in (
            (Round(2, 4, "4"), StaleRound),
            (Round(1, 9, "9"), StaleEpoch),
            (Round(2, 5, "other"), InvalidRequest),
        ):
            with pytest.raises(error):
                await queue.run("a", diary.work("never"), this_round)
        newer = asyncio.create_task(queue.run("a", diary.work("new epoch"), Round(3, 1, "new epoch")))
        await submitted(running, newer)
        with pytest.raises(StaleEpoch):
            await queue.run("a", diary.work("never"), Round(2, 6, "6"))
    assert (await newer)[0] == "new epoch"
    assert not any(line.startswith("never") for line in diary.lines)


async def test_an_end_voids_the_round_that_waits_and_goes_before_the_next() -> None:
    async with round_five_is_running() as (queue, diary, running):
        void = asyncio.create_task(queue.run("a", diary.work("void"), Round(2, 6, "void")))
        await submitted(running, void)
        ends = [asyncio.create_task(queue.run("a", at_once(lambda: diary.lines.append("end")))) for _ in range(50)]
        reopened = asyncio.create_task(queue.run("a", diary.work("reopened"), Round(1, 1, "reopened")))
        await submitted(running, *ends)
        with pytest.raises(StaleRound, match="the end of its session"):
            await void
        with pytest.raises(StaleEpoch):
            await reopened  # the round that runs is not known to be another session's
        reopened = asyncio.create_task(queue.run("a", diary.work("reopened"), Round(3, 1, "reopened")))
        await submitted(running, reopened)
    await asyncio.gather(*ends)
    assert (await reopened)[0] == "reopened"
    assert diary.lines == ["5 begins", "5 got logits", "end", "reopened begins", "reopened got logits"]


async def test_work_of_no_session_waits_for_nobody() -> None:
    diary = Diary()
    async with steered_queue() as (queue, runner):
        with runner.held():
            running = asyncio.create_task(queue.run("a", diary.work("a"), Round(1, 1, "a")))
            await runner.wait_entered()
            free = [
                asyncio.create_task(queue.run(None, diary.work(name, slot=slot))) for slot, name in ((1, "b"), (2, "c"))
            ]
            await submitted(running, *free)
        assert [(await task)[0] for task in (running, *free)] == ["a", "b", "c"]
    assert [len(step) for step in runner.steps] == [1, 2]
