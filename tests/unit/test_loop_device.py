"""A device without a thread: who shares a step, who is served meanwhile, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import OutOfMemory
from specsplit.engine.device import LoopDevice
from specsplit.engine.worker import Worker
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.plan import Entry
from tests.model_zoo import FAMILIES, save_model
from tests.runners import SteeredRunner, steered

Work = Generator[Entry, Tensor, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_model(tmp_path_factory.mktemp("loop"), FAMILIES["llama"](), seed=1, with_tokenizer=False)
    return load_model(str(folder), role="target", threads=1, max_sessions=3, record=False)


def worker_on(device: LoopDevice, model: LoadedModel) -> tuple[Worker, SteeredRunner]:
    loaded, runner = steered(model)
    return Worker(loaded.runner, name="tested", device=device), runner


def work(name: str, num_forwards: int, slot: int = 0) -> Work:
    for position in range(num_forwards):
        yield Entry(slot, position, [7])
    return name


async def test_callers_of_one_turn_of_the_loop_share_their_steps(model: LoadedModel) -> None:
    worker, runner = worker_on(LoopDevice(1), model)
    calls = [
        worker.run(name, lambda name=name, slot=slot: work(name, slot + 1, slot)) for slot, name in enumerate("abc")
    ]
    outcomes = await asyncio.gather(*calls)
    assert [result for result, _ in outcomes] == ["a", "b", "c"]
    assert [[entry.slot for entry in step] for step in runner.steps] == [[0, 1, 2], [1, 2], [2]]


async def test_two_workers_take_turns_and_the_loop_serves_others_between_steps(model: LoadedModel) -> None:
    device = LoopDevice(1)
    (first, _), (second, _) = worker_on(device, model), worker_on(device, model)
    turns = 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(neighbour())
    results = await asyncio.gather(first.run("a", lambda: work("a", 5)), second.run("b", lambda: work("b", 5)))
    beside.cancel()
    assert [result for result, _ in results] == ["a", "b"]
    assert turns >= 5


async def test_a_cancelled_caller_has_left_once_it_returns(model: LoadedModel) -> None:
    worker, runner = worker_on(LoopDevice(1), model)
    task = asyncio.create_task(worker.run("a", lambda: work("a", 100)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert runner.steps
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not worker.has_work
    steps = len(runner.steps)
    assert steps < 100
    assert (await worker.run("a", lambda: work("again", 1)))[0] == "again"


async def test_a_failing_forward_ends_its_callers_and_no_one_else(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, runner = worker_on(LoopDevice(1), model)

    def fail(entries: object) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", fail)
        with pytest.raises(OutOfMemory):
            await worker.run("a", lambda: work("a", 1))
    assert (await worker.run("b", lambda: work("b", 1)))[0] == "b"


async def test_a_mistake_beside_the_forward_reaches_whoever_waits(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = worker_on(LoopDevice(1), model)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_end", lambda step, logits_of: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await worker.run("a", lambda: work("a", 1))
    assert (await worker.run("b", lambda: work("b", 1)))[0] == "b"


async def test_closing_waits_for_the_work_at_hand(model: LoadedModel) -> None:
    device = LoopDevice(1)
    worker, runner = worker_on(device, model)
    task = asyncio.create_task(worker.run("a", lambda: work("a", 4)))
    await asyncio.sleep(0)
    await device.close()
    assert len(runner.steps) == 4
    assert (await task)[0] == "a"


async def test_whoever_closes_it_meanwhile_waits_for_the_work_too(model: LoadedModel) -> None:
    device = LoopDevice(1)
    worker, runner = worker_on(device, model)
    task = asyncio.create_task(worker.run("a", lambda: work("a", 4)))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await asyncio.gather(device.close(), device.close())
    assert len(runner.steps) == 4
    assert (await task)[0] == "a"
    await device.close()
