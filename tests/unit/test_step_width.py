"""A step that takes too much memory goes in parts: only who is alone in its step fails for want of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from specsplit.core.errors import OutOfMemory
from specsplit.core.types import Proposal, SessionParams, Verdict
from specsplit.engine.executor import LoopExecutor
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.runner import Runner
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import START, HashCache, HashRunner, best_tokens, hash_model, row_values
from tests.support.rounds import script

MOST_ROWS = 40


class NarrowRunner(HashRunner):
    """Runs out of memory in every step of more rows."""

    def __init__(self, cache: HashCache) -> None:
        super().__init__("target", cache)
        self.steps: list[int] = []

    def forward(self, entries: Sequence[SequenceInput]) -> list[Tensor]:
        self.steps.append(sum(len(entry.token_ids) for entry in entries))
        if self.steps[-1] > MOST_ROWS:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(entries)


@asynccontextmanager
async def narrow_target() -> AsyncGenerator[tuple[TargetEngine, NarrowRunner]]:
    model, whole = hash_model("target", max_sessions=4, context=100)
    runner = NarrowRunner(whole.cache)
    target = TargetEngine(replace(model, runner=cast(Runner, runner)), LoopExecutor())
    try:
        yield target, runner
        assert not runner.violations
        target.check_integrity()
    finally:
        await target.aclose()


def text(key: str, length: int) -> list[int]:
    return [1 + ord(key) % 30] * length


async def opened(target: TargetEngine, lengths: dict[str, int]) -> list[Verdict | BaseException]:
    """Open sessions at once, so that they meet in one step."""
    turns = [script(SessionParams(), text(key, length), 0, 1, key) for key, length in lengths.items()]
    verifying = [target.verify(turn, Proposal(1, len(turn.tail) - 1)) for turn in turns]
    return await asyncio.gather(*verifying, return_exceptions=True)


def is_right(verdict: Verdict | BaseException, key: str, length: int) -> bool:
    expected = best_tokens(row_values(text(key, length), START)[-1])[0]
    return isinstance(verdict, Verdict) and verdict.bonus_token == expected


async def test_sessions_that_would_fit_alone_are_answered() -> None:
    async with narrow_target() as (target, runner):
        lengths = dict.fromkeys("abc", 30)
        verdicts = await opened(target, lengths)
        assert all(map(is_right, verdicts, lengths, lengths.values()))
        assert runner.steps == [90, 30, 30, 30]
        assert target.is_well
        for key in lengths:
            await target.close(key)
        again = dict.fromkeys("def", 20)
        assert all(map(is_right, await opened(target, again), again, again.values()))
        assert runner.steps[4:] == [40, 20], "later steps are not as wide"


async def test_who_does_not_fit_alone_fails_alone() -> None:
    async with narrow_target() as (target, runner):
        lengths = {"a": 10, "b": 50, "c": 12}
        first, second, third = await opened(target, lengths)
        assert is_right(first, "a", 10)
        assert isinstance(second, OutOfMemory)
        assert is_right(third, "c", 12)
        assert runner.steps == [72, 10, 50, 12]
        assert target.is_well
        await target.close("a")
        await target.close("c")
