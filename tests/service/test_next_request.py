"""The next request of a client, sent as soon as the last answer is there, at workers with one slot each."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.ports import Drafter, Verifier
from specsplit.draft.engine import DraftEngine
from specsplit.engine.executor import LoopExecutor
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.support.long_target import long_model
from tests.support.rounds import random_prompt
from tests.support.rpc_servers import connected

NUM_TURNS = 5


@asynccontextmanager
async def workers(place: str) -> AsyncGenerator[tuple[Drafter, Verifier, tuple[DraftEngine, TargetEngine]]]:
    """Give a draft and a target with one slot each and no queue: on the loop, on threads, or over loopback."""
    executor = LoopExecutor() if place == "loop" else None
    draft, target = DraftEngine(long_model(1, role="draft"), executor), TargetEngine(long_model(1), executor)
    for engine in (draft, target):
        engine.reuse_prefixes("caller")
    try:
        if place == "loopback":
            async with connected(draft, target) as (drafter, verifier):
                yield drafter, verifier, (draft, target)
        else:
            yield draft, target, (draft, target)
    finally:
        await draft.aclose()
        await target.aclose()


async def answer(owner: Orchestrator, prompt_ids: tuple[int, ...]) -> Result:
    """Return the result as soon as it is there."""
    async with aclosing(owner.stream(Request(prompt_ids=prompt_ids, max_new_tokens=12, ignore_eos=True))) as chunks:
        async for chunk in chunks:
            if chunk.result is not None:
                return chunk.result
    raise AssertionError("the last chunk has the result")


@pytest.mark.parametrize("mode", ["pingpong", "overlap", "stream"])
@pytest.mark.parametrize("place", ["loop", "thread", "loopback"])
async def test_the_next_turn_finds_the_slot_and_its_rows(place: str, mode: Mode) -> None:
    tokenizer = long_model(1).tokenizer
    assert tokenizer is not None
    async with workers(place) as (drafter, verifier, engines):
        policy = RetryPolicy(waits_when_full=False, draft_s=60.0)
        owner = Orchestrator(verifier, drafter, tokenizer, Speculation(mode=mode, lookup=False), retry_policy=policy)
        ids = tuple(random_prompt(60))
        for turn in range(NUM_TURNS):
            result = await answer(owner, ids)
            # A target without a queue may refuse the prompt once, which is said; no round goes without the draft.
            assert {(phase.worker, phase.last_round) for phase in result.degraded} <= {("target", 0)}
            if turn:
                assert result.num_reused_tokens >= len(ids) - 8
            ids = (*ids, *result.token_ids, 5, 6, 7)
        await owner.aclose()
        for engine in engines:
            assert engine.num_sessions == 0
            engine.check_integrity()
