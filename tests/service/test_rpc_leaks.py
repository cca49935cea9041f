"""Sessions that end, are left, are cancelled or whose client vanishes, over gRPC: nothing of them stays behind."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.types import Proposal
from specsplit.draft.engine import DraftEngine
from specsplit.engine.executor import ThreadExecutor
from specsplit.model.loader import LoadedModel, load_model
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.rpc.clients import RemoteVerifier
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.contract.session_contract import Script
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.rpc_servers import connected, wait_until

NUM_SESSIONS = 10_000 if os.environ.get("SPECSPLIT_TEST_ALL") == "1" else 300
AT_ONCE = 4
TTL_S, GRACE_S = 60.0, 5.0


class SteppedClock:
    """Stands still until it is told how late it is."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    root = tmp_path_factory.mktemp("leaks")
    loaded: dict[str, LoadedModel] = {}
    for role, family, seed in (("target", "llama", 1), ("draft", "qwen2", 2)):
        folder = save_model(root / role, FAMILIES[family](), seed)
        loaded[role] = load_model(str(folder), role=role, max_sessions=8, context=64, threads=1)  # type: ignore[arg-type]
    return loaded


@asynccontextmanager
async def engines(
    models: dict[str, LoadedModel], clock: SteppedClock
) -> AsyncIterator[tuple[DraftEngine, TargetEngine]]:
    device = ThreadExecutor("leaks", 1)
    draft = DraftEngine(models["draft"], device, ttl_s=TTL_S, grace_s=GRACE_S, clock=clock)
    target = TargetEngine(models["target"], device, ttl_s=TTL_S, grace_s=GRACE_S, clock=clock)
    try:
        yield draft, target
    finally:
        await draft.aclose()
        await target.aclose()
        await device.close()


async def use(orchestrator: Orchestrator, verifier: RemoteVerifier, number: int) -> None:
    """Open one session and end it in one of four ways."""
    prompt = tuple(1 + (number * 7 + i) % 200 for i in range(3))
    request = Request(prompt_ids=prompt, max_new_tokens=6, seed=number, ignore_eos=True)
    way = number % 4
    if way == 0:
        assert len((await orchestrator.generate(request)).token_ids) == 6
    elif way == 1:
        async with aclosing(orchestrator.stream(request)) as chunks:
            await anext(chunks)
    elif way == 2:
        task = asyncio.create_task(orchestrator.generate(request))
        await asyncio.sleep(0.0005 * (number % 9))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        turn = Script(prompt).first(prompt)
        await verifier.verify(turn, Proposal(first_node=1, root_position=len(prompt) - 1))  # and never closed


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_slot_task_or_descriptor_is_left_behind(models: dict[str, LoadedModel]) -> None:
    clock = SteppedClock()
    tokenizer = models["target"].tokenizer
    assert tokenizer is not None
    async with engines(models, clock) as (draft, target), connected(draft, target) as (drafter, verifier):
        modes: tuple[Mode, ...] = ("auto", "stream")
        orchestrators = [
            Orchestrator(
                verifier, drafter, tokenizer, Speculation(mode=mode, lookup=False, nodes=3, depth=2, branching=2)
            )
            for mode in modes
        ]
        for warm_up in range(8):
            await use(orchestrators[warm_up // 4], verifier, warm_up)
        tasks, descriptors = len(asyncio.all_tasks()), num_descriptors()
        for first in range(4, NUM_SESSIONS, AT_ONCE):
            served = orchestrators[first // AT_ONCE % 2]
            await asyncio.gather(*(use(served, verifier, first + i) for i in range(AT_ONCE)))
            clock.time_s += GRACE_S  # the slots of clients that vanished may be taken over now
            assert target.num_sessions <= 8
        for orchestrator in orchestrators:
            await orchestrator.aclose()
        clock.time_s += TTL_S
        assert await target.sweep() >= 1
        await draft.sweep()
        assert (target.num_sessions, draft.num_sessions) == (0, 0)
        gc.collect()
        await wait_until(lambda: len(asyncio.all_tasks()) <= tasks and num_descriptors() <= descriptors)
