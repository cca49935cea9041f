"""The event loop as the executor: who shares a step, who is served meanwhile, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import OutOfMemory, WorkerClosed
from specsplit.engine import executor as executor_module
from specsplit.engine.batch import Batch, Round
from specsplit.engine.executor import LoopExecutor
from specsplit.engine.scheduler import WorkQueue
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.runners import SteeredRunner, steered

Work = Generator[SequenceInput, Tensor, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_model(tmp_path_factory.mktemp("loop"), FAMILIES["llama"](), seed=1, with_tokenizer=False)
    return load_model(str(folder), role="target", threads=1, max_sessions=3, record=False)


def queue_on(executor: LoopExecutor, model: LoadedModel) -> tuple[WorkQueue, SteeredRunner]:
    loaded, runner = steered(model)
    return WorkQueue(loaded.runner, name="tested", executor=executor), runner


def work(name: str, num_forwards: int, slot: int = 0) -> Work:
    for position in range(num_forwards):
        yield SequenceInput(slot, position, [7])
    return name


async def alone(model: LoadedModel) -> tuple[WorkQueue, SteeredRunner]:
    """Have session "a" be the last that came, by one step: while it stays alone, it is stepped where it asks."""
    queue, runner = queue_on(LoopExecutor(1), model)
    await queue.run("a", work("known", 1))
    return queue, runner


@pytest.fixture
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is due a turn whenever somebody asks."""
    monkeypatch.setattr(executor_module, "TURN_S", 0.0)


async def test_callers_of_one_turn_of_the_loop_share_their_steps(model: LoadedModel) -> None:
    queue, runner = queue_on(LoopExecutor(1), model)
    calls = [queue.run(name, work(name, slot + 1, slot)) for slot, name in enumerate("abc")]
    outcomes = await asyncio.gather(*calls)
    assert [result for result, _ in outcomes] == ["a", "b", "c"]
    assert [[entry.slot for entry in step] for step in runner.steps] == [[0, 1, 2], [1, 2], [2]]


@pytest.mark.parametrize("num_turns", [1, 12])
async def test_whoever_got_a_result_has_the_turns_to_come_back_with_more(model: LoadedModel, num_turns: int) -> None:
    """A client's next request begins a dozen turns after its last one; a step that does not wait for it is lost."""
    queue, runner = queue_on(LoopExecutor(1), model)

    async def ask_again_and_again(name: str, slot: int) -> None:
        for _ in range(4):
            await queue.run(name, work(name, 1, slot))
            for _ in range(num_turns - 1):
                await asyncio.sleep(0)

    others = asyncio.create_task(queue.run("c", work("c", 6, 2)))
    await asyncio.gather(ask_again_and_again("a", 0), ask_again_and_again("b", 1), others)
    assert [len(step) for step in runner.steps] == [3, 3, 3, 3, 1, 1]


async def test_two_workers_take_turns_and_the_loop_serves_others_between_steps(model: LoadedModel) -> None:
    executor = LoopExecutor(1)
    (first, _), (second, _) = queue_on(executor, model), queue_on(executor, model)
    turns = 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(neighbour())
    results = await asyncio.gather(first.run("a", work("a", 5)), second.run("b", work("b", 5)))
    beside.cancel()
    assert [result for result, _ in results] == ["a", "b"]
    assert turns >= 5


async def test_a_cancelled_caller_has_left_once_it_returns(model: LoadedModel) -> None:
    queue, runner = queue_on(LoopExecutor(1), model)
    task = asyncio.create_task(queue.run("a", work("a", 100)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert runner.steps
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not queue.statistics().has_work
    steps = len(runner.steps)
    assert steps < 100
    assert (await queue.run("a", work("again", 1)))[0] == "again"


@pytest.mark.parametrize("is_alone", [False, True])
async def test_a_failing_forward_ends_its_callers_and_no_one_else(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    queue, runner = await alone(model) if is_alone else queue_on(LoopExecutor(1), model)

    def fail(entries: object) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", fail)
        with pytest.raises(OutOfMemory):
            await queue.run("a", work("a", 1))
    assert queue.is_in_doubt
    assert (await queue.run("b", work("b", 1)))[0] == "b"
    assert not queue.is_in_doubt


@pytest.mark.parametrize("is_alone", [False, True])
async def test_a_mistake_beside_the_forward_reaches_whoever_waits(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    queue, _ = await alone(model) if is_alone else queue_on(LoopExecutor(1), model)
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "end", lambda batch, scheduler, counts: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await queue.run("a", work("a", 1))
    assert (await queue.run("b", work("b", 1)))[0] == "b"


async def test_a_session_that_is_alone_is_stepped_where_it_asks(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "TURN_S", 3600.0)
    queue, runner = await alone(model)
    asked = queue.run("a", work("a", 3))
    with pytest.raises(StopIteration) as ended:
        asked.send(None)  # it never waits for anything
    result, timings = ended.value.value
    assert (result, timings.num_forwards, timings.num_tokens, timings.batch_size) == ("a", 3, 3, 1)
    assert 0 < timings.device_ms <= timings.wall_ms
    assert len(runner.steps) == 4
    assert not queue.statistics().has_work
    assert queue.statistics().num_sessions == 0


@pytest.mark.usefixtures("always_due")
async def test_a_session_that_is_alone_leaves_the_loop_its_turns(model: LoadedModel) -> None:
    queue, runner = await alone(model)
    done: list[int] = []

    async def neighbour() -> None:
        while True:
            done.append(len(runner.steps))
            await asyncio.sleep(0)

    beside = asyncio.create_task(neighbour())
    outcomes = [await queue.run("a", work("a", 4)) for _ in range(2)]
    beside.cancel()
    assert [(result, timings.num_forwards) for result, timings in outcomes] == [("a", 4), ("a", 4)]
    assert sorted(set(done)) == list(range(2, 10)), "a turn after each step"
    assert not queue.statistics().has_work
    assert queue.statistics().num_sessions == 0


async def test_sessions_that_come_to_one_that_was_alone_share_its_steps(model: LoadedModel) -> None:
    queue, runner = await alone(model)
    runner.steps.clear()

    async def rounds(name: str, slot: int) -> None:
        for _ in range(3):
            await queue.run(name, work(name, 1, slot))

    await asyncio.gather(rounds("b", 1), rounds("a", 0))
    assert [sorted(entry.slot for entry in step) for step in runner.steps] == [[0, 1]] * 3


@pytest.mark.usefixtures("always_due")
@pytest.mark.parametrize(("num_forwards", "num_done"), [(1, 1), (4, 2)])
async def test_a_caller_may_be_cancelled_in_the_turn_after_a_step(
    model: LoadedModel, num_forwards: int, num_done: int
) -> None:
    queue, runner = await alone(model)
    task = asyncio.create_task(queue.run("a", work("a", num_forwards)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(runner.steps) == 1 + num_done
    assert not queue.statistics().has_work
    assert queue.statistics().num_sessions == 0
    assert (await queue.run("a", work("again", 1)))[0] == "again"


@pytest.mark.usefixtures("always_due")
async def test_a_worker_closed_in_the_turn_after_a_step_still_gives_its_result(model: LoadedModel) -> None:
    queue, _ = await alone(model)
    task = asyncio.create_task(queue.run("a", work("a", 1)))
    await asyncio.sleep(0)
    await queue.close()
    assert (await task)[0] == "a"
    with pytest.raises(WorkerClosed):
        await queue.run("a", work("a", 1))


@pytest.mark.usefixtures("always_due")
async def test_what_comes_in_the_turn_after_a_step_keeps_its_order(model: LoadedModel) -> None:
    queue, _ = await alone(model)
    begun: list[str] = []

    def noted(name: str) -> Work:
        begun.append(name)
        return (yield from work(name, 2))

    first, repeat, newer = (Round(1, number, "body") for number in (1, 1, 2))
    asked = [
        queue.run("a", noted("first"), first),
        queue.run("b", noted("other")),
        queue.run("a", noted("repeat"), repeat),
        queue.run("a", noted("newer"), newer),
    ]
    outcomes = await asyncio.gather(*asked)
    assert [result for result, _ in outcomes] == ["first", "other", "first", "newer"]
    assert begun.index("first") < begun.index("newer")
    assert "repeat" not in begun
    assert not queue.statistics().has_work
    assert queue.statistics().num_sessions == 0


@pytest.mark.usefixtures("always_due")
async def test_whoever_joined_work_that_its_caller_left_gets_its_result(model: LoadedModel) -> None:
    queue, runner = await alone(model)
    this_round = Round(1, 1, "body")
    caller, joined, leaving = (asyncio.create_task(queue.run("a", work("a", 2), this_round)) for _ in range(3))
    await asyncio.sleep(0)
    leaving.cancel()
    caller.cancel()
    assert (await joined)[0] == "a"
    await asyncio.wait({caller, leaving})
    assert caller.cancelled()
    assert leaving.cancelled()
    assert len(runner.steps) == 3
    assert queue.statistics().num_sessions == 0


async def test_closing_waits_for_the_work_at_hand(model: LoadedModel) -> None:
    executor = LoopExecutor(1)
    queue, runner = queue_on(executor, model)
    task = asyncio.create_task(queue.run("a", work("a", 4)))
    await asyncio.sleep(0)
    await executor.close()
    assert len(runner.steps) == 4
    assert (await task)[0] == "a"


async def test_whoever_closes_it_meanwhile_waits_for_the_work_too(model: LoadedModel) -> None:
    executor = LoopExecutor(1)
    queue, runner = queue_on(executor, model)
    task = asyncio.create_task(queue.run("a", work("a", 4)))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await asyncio.gather(executor.close(), executor.close())
    assert len(runner.steps) == 4
    assert (await task)[0] == "a"
    await executor.close()
