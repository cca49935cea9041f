"""A stage that runs out of memory in a step of several sessions: they go on in smaller steps, with the same texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specsplit.core.errors import OutOfMemory
from specsplit.core.types import SamplingParams
from specsplit.model.attention.metadata import SequenceInput
from specsplit.target.engine import TargetEngine
from tests.support.remote_chains import opened_remote
from tests.support.rounds import text_after
from tests.support.small_target import TEXT_LENGTH, shards, whole

LENGTHS = (30, 33, 36)
SAMPLING = SamplingParams(temperature=0.7)
ONE_AT_A_TIME: dict[str, Any] = {"max_pending": 1, "chunk_tokens": 64}
"""The first prompt is a step of its own; the others wait for it and meet in the next one."""


def limited(rows: Callable[..., Any], most_rows: int, failed: list[int]) -> Callable[..., Any]:
    """Return a stage's forward that takes no more rows than a device with little memory would."""

    def run(entries: Sequence[SequenceInput], *arguments: Any) -> Any:
        if (num_rows := sum(len(entry.token_ids) for entry in entries)) > most_rows:
            failed.append(num_rows)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return rows(entries, *arguments)

    return run


async def texts_of_one_process() -> list[list[int]]:
    target = TargetEngine(whole())
    texts = [await text_after(target, SAMPLING, length, TEXT_LENGTH) for length in LENGTHS]
    await target.aclose()
    return texts


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
async def test_sessions_go_on_in_steps_that_a_stage_has_memory_for(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, failed = await texts_of_one_process(), list[int]()
    async with opened_remote(shards(ends), **ONE_AT_A_TIME) as chain:
        runner = chain.hosts[1].shard.runner
        monkeypatch.setattr(runner, "rows", limited(runner.rows, max(LENGTHS), failed))
        texts = await asyncio.gather(*(text_after(chain.target, SAMPLING, length, TEXT_LENGTH) for length in LENGTHS))
        assert texts == expected
        assert failed, "prompts met in one step"
        assert chain.link.statistics.num_connections == 1
        assert chain.target.is_well


async def test_a_prompt_that_a_stage_has_no_memory_for_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await texts_of_one_process()
    async with opened_remote(shards("stages"), **ONE_AT_A_TIME) as chain:
        runner = chain.hosts[1].shard.runner
        monkeypatch.setattr(runner, "rows", limited(runner.rows, LENGTHS[1], []))
        writing = (text_after(chain.target, SAMPLING, length, TEXT_LENGTH) for length in LENGTHS)
        *others, refused = await asyncio.gather(*writing, return_exceptions=True)
        assert others == expected[:2]
        assert isinstance(refused, OutOfMemory)
