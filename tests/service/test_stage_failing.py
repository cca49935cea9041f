"""Stages whose device fails in every step while they answer pings: a spare that computes takes over, if any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from specsplit.core.errors import SpecSplitError
from specsplit.engine.executor import MAX_FAILED_STEPS
from tests.support.processes import LIMIT_S
from tests.support.remote_chains import RemoteOpen, StageHost, opened_remote
from tests.support.rounds import plain_text
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, shards, spare, truth


def break_device(host: StageHost, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let every forward of a host fail as a lost device's does; the function returned mends it."""
    runner = host.shard.runner

    def fail(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(runner, "rows", fail)
    return lambda: monkeypatch.delattr(runner, "rows")


async def written(chain: RemoteOpen) -> list[int]:
    """Return the text that the chain writes as soon as it writes one, looked at as often as a target does."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(SpecSplitError):
                return await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH)
            await chain.link.look()


async def test_a_spare_replaces_a_stage_whose_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    text = await asyncio.to_thread(truth)
    spares = [await asyncio.to_thread(spare, 1, "stages")]
    async with opened_remote(shards("stages"), spares) as chain:
        break_device(chain.hosts[1], monkeypatch)
        assert await written(chain) == text
        assert chain.link.statistics.spares_used == [chain.spares[0].address]


@pytest.mark.parametrize("has_spare", [True, False])
async def test_a_failing_stage_stays_where_no_spare_is_better(has_spare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = await asyncio.to_thread(truth)
    spares = [await asyncio.to_thread(spare, 1, "stages")] if has_spare else []
    async with opened_remote(shards("stages"), spares) as chain:
        mend = break_device(chain.hosts[1], monkeypatch)
        if has_spare:
            await chain.spares[0].stop()
        for _ in range(MAX_FAILED_STEPS):
            with pytest.raises(SpecSplitError, match=r"internal error|failed"):
                await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH)
            await chain.link.look()
        assert chain.link.trouble is None, "there is no other to wait for"
        mend()
        assert await written(chain) == text
        assert chain.link.statistics.spares_used == []
        assert chain.link.statistics.num_connections == 1


async def test_a_lost_stage_is_replaced_by_a_failing_spare_rather_than_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    text = await asyncio.to_thread(truth)
    spares = [await asyncio.to_thread(spare, 1, "stages")]
    async with opened_remote(shards("stages"), spares) as chain:
        failing = chain.hosts[1]
        mend = break_device(failing, monkeypatch)
        assert await written(chain) == text
        mend()
        await chain.spares[0].stop()
        assert await written(chain) == text
        assert chain.link.statistics.spares_used == [chain.spares[0].address, failing.address]
