"""Scores have a share of a target's slots, so that any number of them leaves room for texts, and callers take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from specsplit.core.errors import NoFreeSlot, SpecSplitError
from specsplit.core.types import Scores
from specsplit.rpc import shares
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import SCORE_SLOTS, TargetService
from specsplit.rpc.shares import CallShare
from specsplit.telemetry.statistics import WorkerLoad
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeTarget
from tests.support.rpc_servers import LOOPBACK, verifier_at, wait_until

NUM_SLOTS = 8


class SlowScorer(FakeTarget):
    """Holds every score until `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.num_scoring = self.most_scoring = 0

    async def score(self, *args: Any, **options: Any) -> Scores:
        self.num_scoring += 1
        self.most_scoring = max(self.most_scoring, self.num_scoring)
        try:
            await self.gate.wait()
            return await super().score(*args, **options)
        finally:
            self.num_scoring -= 1


class Front:
    """A worker with eight slots and nobody in its queue."""

    load = WorkerLoad(0, NUM_SLOTS, NUM_SLOTS, 0)

    def refuse_waiting(self, error: Callable[[], SpecSplitError]) -> None:
        return


async def test_eight_loops_of_scores_leave_slots_for_texts() -> None:
    target = SlowScorer()
    async with serving(LOOPBACK, [TargetService(target, front=Front())]) as server, verifier_at(server) as client:
        scores = [asyncio.create_task(client.score([1, 2], [3])) for _ in range(NUM_SLOTS)]
        await wait_until(lambda: server.num_running == NUM_SLOTS)
        turn = Script().first()
        assert len((await client.verify(turn, without_tree(turn))).token_ids) == 1
        scores.pop().cancel()
        target.gate.set()
        assert all(len(score.log_probs) == 1 for score in await asyncio.gather(*scores))
        await wait_until(lambda: server.num_running == 0)
    assert target.most_scoring == NUM_SLOTS // SCORE_SLOTS


async def test_callers_take_turns_and_none_waits_with_too_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_WAITING", 3)
    share, order = CallShare(1), list[str]()

    async def call(caller: str) -> None:
        async with share.taken(caller):
            order.append(caller)
            await asyncio.sleep(0)

    calls = [asyncio.create_task(call(caller)) for caller in ("greedy",) * 4 + ("modest", "modest", "late")]
    await asyncio.sleep(0)
    with pytest.raises(NoFreeSlot):
        await call("greedy")
    calls.pop().cancel()
    await asyncio.gather(*calls)
    assert order == ["greedy", "greedy", "modest", "greedy", "modest", "greedy"]
    await call("later")
    assert order[-1] == "later", "the share is free again"
