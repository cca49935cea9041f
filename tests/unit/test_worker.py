"""The thread at a device: who shares a step, in which order, and what happens to the others when one ends badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import InvalidRequest, StaleEpoch, StaleRound, WorkerClosed
from specsplit.engine.admission import MAX_CALLERS, Round
from specsplit.engine.worker import Worker, at_once
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.plan import Entry
from tests.model_zoo import FAMILIES, save_model
from tests.runners import SteeredRunner, steered

MAX_SESSIONS = 4
_models: list[LoadedModel] = []


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_model(tmp_path_factory.mktemp("worker"), FAMILIES["llama"](), seed=1, with_tokenizer=False)
    _models.append(load_model(str(folder), role="target", threads=1, max_sessions=MAX_SESSIONS, record=False))


@asynccontextmanager
async def worker_over_a_steered_runner() -> AsyncIterator[tuple[Worker, SteeredRunner]]:
    loaded, runner = steered(_models[0])
    worker = Worker(loaded.runner, name="tested")
    try:
        yield worker, runner
    finally:
        await worker.close()


Work = Generator[Entry, Tensor, str]


@dataclass
class Diary:
    """What the works of a test did, in the order in which they did it."""

    lines: list[str] = field(default_factory=list[str])

    def work(
        self, name: str, num_forwards: int = 1, *, slot: int = 0, error: Exception | None = None
    ) -> Callable[[], Work]:
        """Return work that feeds `num_forwards` tokens, then raises `error` or returns its name."""

        def start() -> Work:
            self.lines.append(f"{name} begins")
            try:
                for position in range(num_forwards):
                    logits = yield Entry(slot, position, [7])
                    assert logits.shape == (1, 320)
                    self.lines.append(f"{name} got logits")
            except GeneratorExit:
                self.lines.append(f"{name} is closed")
                raise
            if error is not None:
                raise error
            return name

        return start


async def submitted(*tasks: asyncio.Task[object]) -> None:
    """Give tasks just made the turn in which they hand their work over."""
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_the_work_gets_its_logits_and_its_caller_the_result_with_timings() -> None:
    async with worker_over_a_steered_runner() as (worker, runner):
        result, timings = await worker.run("a", Diary().work("a", 3))
    assert result == "a"
    assert (timings.num_forwards, timings.num_tokens, timings.batch_size) == (3, 3, 1)
    assert len(runner.steps) == 3


async def test_work_without_a_forward_needs_no_step() -> None:
    async with worker_over_a_steered_runner() as (worker, runner):
        result, timings = await worker.run("a", Diary().work("a", 0))
    assert (result, timings.num_forwards, runner.steps) == ("a", 0, [])


async def test_a_newer_round_runs_when_the_one_before_has_ended() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            first = asyncio.create_task(worker.run("a", diary.work("x", 2), Round(1, 1, "x")))
            await runner.wait_entered()
            second = asyncio.create_task(worker.run("a", diary.work("y", 2), Round(1, 2, "y")))
            await submitted(first, second)
            assert diary.lines == ["x begins"]
        assert [(await first)[0], (await second)[0]] == ["x", "y"]
        assert worker.num_lines == 0
    assert diary.lines == [line for name in "xy" for line in (f"{name} begins", *[f"{name} got logits"] * 2)]
    assert [len(step) for step in runner.steps] == [1] * 4


async def test_sessions_that_wait_meet_in_one_step_and_leave_it_one_by_one() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            first = asyncio.create_task(worker.run("a", diary.work("a", 2)))
            await runner.wait_entered()
            others = [
                asyncio.create_task(worker.run(name, diary.work(name, slot, slot=slot)))
                for slot, name in enumerate("bcd", 1)
            ]
            await submitted(first, *others)
        outcomes = await asyncio.gather(first, *others)
    assert [[entry.slot for entry in step] for step in runner.steps] == [[0], [0, 1, 2, 3], [2, 3], [3]]
    assert [(result, timings.batch_size) for result, timings in outcomes] == [("a", 4), ("b", 4), ("c", 4), ("d", 4)]
    assert [timings.num_forwards for _, timings in outcomes] == [2, 1, 2, 3]


async def test_each_entry_of_a_common_step_gets_its_own_logits() -> None:
    def prefill(slot: int, token_ids: list[int]) -> Callable[[], Generator[Entry, Tensor, Tensor]]:
        def start() -> Generator[Entry, Tensor, Tensor]:
            return (yield Entry(slot, 0, token_ids, num_logits=len(token_ids)))

        return start

    prompts = [[5, 9, 2], [7], [11, 3, 8, 1]]
    async with worker_over_a_steered_runner() as (worker, runner):
        alone = [(await worker.run("x", prefill(slot, prompt)))[0] for slot, prompt in enumerate(prompts)]
        with runner.held():
            blocker = asyncio.create_task(worker.run("x", Diary().work("x", slot=3)))
            await runner.wait_entered()
            tasks = [
                asyncio.create_task(worker.run(str(slot), prefill(slot, prompt))) for slot, prompt in enumerate(prompts)
            ]
            await submitted(*tasks)
        await blocker
        together = [(await task)[0] for task in tasks]
    assert len(runner.steps[-1]) == 3
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


async def test_an_error_of_the_work_reaches_its_caller_only() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            first = asyncio.create_task(worker.run("a", diary.work("a", 3)))
            await runner.wait_entered()
            broken = asyncio.create_task(worker.run("b", diary.work("b", slot=1, error=ValueError("the work's own"))))
            await submitted(first, broken)
        with pytest.raises(ValueError, match="the work's own"):
            await broken
        assert (await first)[0] == "a"
        assert (await worker.run("b", diary.work("b again")))[0] == "b again"


async def test_work_that_cannot_even_begin_fails_alone() -> None:
    def start() -> Work:
        raise LookupError("no such work")

    async with worker_over_a_steered_runner() as (worker, _):
        with pytest.raises(LookupError, match="no such work"):
            await worker.run("a", start)
        assert (await worker.run("a", Diary().work("a")))[0] == "a"


async def test_a_step_that_fails_ends_all_who_shared_it_and_the_next_one_runs() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            blocker = asyncio.create_task(worker.run("x", diary.work("x", slot=3)))
            await runner.wait_entered()
            sharing = [
                asyncio.create_task(worker.run(name, diary.work(name, slot=slot))) for slot, name in enumerate("ab")
            ]
            waiting = asyncio.create_task(worker.run("a", diary.work("later"), Round(1, 1, "later")))
            await submitted(blocker, *sharing, waiting)
            runner.failures[len(runner.steps)] = RuntimeError("the device broke")
        assert (await blocker)[0] == "x"
        for task in sharing:
            with pytest.raises(RuntimeError, match="device broke"):
                await task
        assert (await waiting)[0] == "later"
    assert {"a is closed", "b is closed"} <= set(diary.lines)


async def test_cancelling_a_caller_ends_its_work_before_the_next_step() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            cancelled = asyncio.create_task(worker.run("a", diary.work("a", 5)))
            await runner.wait_entered()
            cancelled.cancel()
            await submitted(cancelled)  # it has not ended while its forward is under way
            follower = asyncio.create_task(worker.run("a", diary.work("follower")))
            await submitted(follower)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert "a is closed" in diary.lines, "once its caller is back, the work has let go of its session"
        assert (await follower)[0] == "follower"
    assert [line for line in diary.lines if line.startswith("a ")] == ["a begins", "a got logits", "a is closed"]
    assert len(runner.steps) == 2


async def test_a_round_cancelled_while_it_waits_leaves_no_trace() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            running = asyncio.create_task(worker.run("a", diary.work("running", 2), Round(1, 1, "running")))
            await runner.wait_entered()
            cancelled = asyncio.create_task(worker.run("a", diary.work("cancelled", 2), Round(1, 3, "cancelled")))
            await submitted(running, cancelled)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            last = asyncio.create_task(worker.run("a", diary.work("last"), Round(1, 2, "last")))
            await submitted(running, last)
        assert [(await running)[0], (await last)[0]] == ["running", "last"]
        assert worker.num_lines == 0
    assert not any(line.startswith("cancelled") for line in diary.lines)
    assert len(runner.steps) == 3


async def test_a_cancelled_caller_does_not_disturb_those_in_its_step() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            blocker = asyncio.create_task(worker.run("x", diary.work("x", slot=3)))
            await runner.wait_entered()
            cancelled = asyncio.create_task(worker.run("a", diary.work("a", 9)))
            staying = asyncio.create_task(worker.run("b", diary.work("b", 9, slot=1)))
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
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            tasks = [
                asyncio.create_task(worker.run("a", diary.work("a", 3), Round(1, 1, "a"))),
                asyncio.create_task(worker.run("b", diary.work("b", 2, slot=1))),
            ]
            await runner.wait_entered()
            waiting = [
                asyncio.create_task(worker.run("a", diary.work("end"))),
                asyncio.create_task(worker.run("a", diary.work("waiting", 2), Round(1, 2, "waiting"))),
            ]
            closing = asyncio.create_task(worker.close())
            await submitted(closing, *tasks, *waiting)
        await closing
        assert [(await task)[0] for task in tasks] == ["a", "b"]
        for task in waiting:
            with pytest.raises(WorkerClosed):
                await task
        with pytest.raises(WorkerClosed):
            await worker.run("a", diary.work("too late"))
        assert worker.num_lines == 0


@asynccontextmanager
async def round_five_is_running() -> AsyncIterator[tuple[Worker, Diary, asyncio.Task[object]]]:
    """Give a worker in whose session "a" round 5 of epoch 2 is held until the block is left; wait for what follows."""
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            running = asyncio.create_task(worker.run("a", diary.work("5"), Round(2, 5, "5")))
            await runner.wait_entered()
            yield worker, diary, running
        assert (await running)[0] == "5"  # type: ignore[index]
        async with asyncio.timeout(60):
            while worker.num_lines:
                await worker.run(None, at_once(lambda: None))


async def test_of_a_flood_of_newer_rounds_the_last_one_runs_and_the_others_are_told() -> None:
    async with round_five_is_running() as (worker, diary, running):
        rounds = [
            asyncio.create_task(worker.run("a", diary.work(f"{number}"), Round(2, number, number)))
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
    async with round_five_is_running() as (worker, diary, running):
        waiting = [
            asyncio.create_task(worker.run("a", diary.work(name), Round(2, 6, "six"))) for name in ("6", "6 again")
        ]
        await submitted(*waiting)
        repeats = [asyncio.create_task(worker.run("a", diary.work("5 again"), Round(2, 5, "5"))) for _ in range(3)]
        await submitted(running, *repeats)
    assert await asyncio.gather(*repeats) == [await running] * 3
    assert (await waiting[0])[0] == "6"
    assert await waiting[0] == await waiting[1]
    assert [line for line in diary.lines if "begins" in line] == ["5 begins", "6 begins"]


async def test_of_a_flood_of_repeats_the_newest_stay() -> None:
    async with round_five_is_running() as (worker, diary, running):
        waiting = [asyncio.create_task(worker.run("a", diary.work("6"), Round(2, 6, "six"))) for _ in range(100)]
        await submitted(running)
        outcomes = asyncio.gather(*waiting, return_exceptions=True)
    await running
    kinds = [type(outcome) for outcome in await outcomes]
    assert kinds == [StaleRound] * (100 - MAX_CALLERS) + [tuple] * MAX_CALLERS


async def test_a_round_goes_on_while_one_of_its_callers_waits() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            first = asyncio.create_task(worker.run("a", diary.work("a", 3), Round(1, 1, "a")))
            await runner.wait_entered()
            repeat = asyncio.create_task(worker.run("a", diary.work("repeat"), Round(1, 1, "a")))
            await submitted(first, repeat)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        assert (await repeat)[0] == "a"
    assert len(runner.steps) == 3


async def test_a_round_whose_callers_have_all_left_is_not_joined_but_done_again() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            left = asyncio.create_task(worker.run("a", diary.work("a", 3), Round(1, 1, "a")))
            await runner.wait_entered()
            left.cancel()
            await submitted(left)
            repeat = asyncio.create_task(worker.run("a", diary.work("repeat"), Round(1, 1, "a")))
            await submitted(left, repeat)
        with pytest.raises(asyncio.CancelledError):
            await left
        assert (await repeat)[0] == "repeat"
        assert worker.num_lines == 0


async def test_what_is_older_or_other_than_the_running_round_is_refused_at_once() -> None:
    async with round_five_is_running() as (worker, diary, running):
        for this_round, error in (
            (Round(2, 4, "4"), StaleRound),
            (Round(1, 9, "9"), StaleEpoch),
            (Round(2, 5, "other"), InvalidRequest),
        ):
            with pytest.raises(error):
                await worker.run("a", diary.work("never"), this_round)
        newer = asyncio.create_task(worker.run("a", diary.work("new epoch"), Round(3, 1, "new epoch")))
        await submitted(running, newer)
        with pytest.raises(StaleEpoch):
            await worker.run("a", diary.work("never"), Round(2, 6, "6"))
    assert (await newer)[0] == "new epoch"
    assert not any(line.startswith("never") for line in diary.lines)


async def test_an_end_voids_the_round_that_waits_and_goes_before_the_next() -> None:
    async with round_five_is_running() as (worker, diary, running):
        void = asyncio.create_task(worker.run("a", diary.work("void"), Round(2, 6, "void")))
        await submitted(running, void)
        ends = [asyncio.create_task(worker.run("a", at_once(lambda: diary.lines.append("end")))) for _ in range(50)]
        reopened = asyncio.create_task(worker.run("a", diary.work("reopened"), Round(1, 1, "reopened")))
        await submitted(running, *ends)
        with pytest.raises(StaleRound, match="the end of its session"):
            await void
        with pytest.raises(StaleEpoch):
            await reopened  # the round that runs is not known to be another session's
        reopened = asyncio.create_task(worker.run("a", diary.work("reopened"), Round(3, 1, "reopened")))
        await submitted(running, reopened)
    await asyncio.gather(*ends)
    assert (await reopened)[0] == "reopened"
    assert diary.lines == ["5 begins", "5 got logits", "end", "reopened begins", "reopened got logits"]


async def test_work_of_no_session_waits_for_nobody() -> None:
    diary = Diary()
    async with worker_over_a_steered_runner() as (worker, runner):
        with runner.held():
            running = asyncio.create_task(worker.run("a", diary.work("a"), Round(1, 1, "a")))
            await runner.wait_entered()
            free = [
                asyncio.create_task(worker.run(None, diary.work(name, slot=slot)))
                for slot, name in ((1, "b"), (2, "c"))
            ]
            await submitted(running, *free)
        assert [(await task)[0] for task in (running, *free)] == ["a", "b", "c"]
    assert [len(step) for step in runner.steps] == [1, 2]


async def test_the_event_loop_goes_on_while_a_forward_runs() -> None:
    async with worker_over_a_steered_runner() as (worker, runner):
        enough = asyncio.Event()

        async def tick() -> None:
            for _ in range(100):
                await asyncio.sleep(0)
            enough.set()

        with runner.held():
            work = asyncio.create_task(worker.run("a", Diary().work("a")))
            await runner.wait_entered()
            ticking = asyncio.create_task(tick())
            await enough.wait()
            await submitted(work)
        await work
        await ticking


def test_a_worker_serves_one_event_loop_after_another() -> None:
    """As a Python caller may: each asyncio.run has its own loop, the worker and its thread stay."""
    loaded, _ = steered(_models[0])
    worker = Worker(loaded.runner, name="tested")
    for name in "ab":
        assert asyncio.run(worker.run("a", Diary().work(name)))[0] == name
    asyncio.run(worker.close())
