"""Spares that do not serve in the place of a lost stage, and spares that serve from the start."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace

import pytest

from specsplit.core.errors import InvalidRequest, WorkerUnreachable
from specsplit.rpc.auth import PeerIdentity
from specsplit.stages.wire.claim import NextAddresses
from specsplit.stages.wire.remote_chain import RemoteChain
from tests.support.processes import LIMIT_S
from tests.support.remote_chains import RemoteOpen, StageHost, expected_of, mended, opened_over, served
from tests.support.rounds import plain_text
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, shards, spare, truth


class AllBut(NextAddresses):
    """Refuses one address."""

    def __init__(self, refused: str) -> None:
        super().__init__()
        self._refused = refused

    def check(self, address: str, caller: PeerIdentity) -> None:
        if address == self._refused:
            raise InvalidRequest("The stage may not dial the address of the next stage.", param="next_address")


async def _forbid(host: StageHost, following: StageHost) -> None:
    """Start a stage again that may not dial another one."""
    host.following = AllBut(following.address)
    await host.restart()


@asynccontextmanager
async def _using(host: StageHost) -> AsyncIterator[None]:
    """Let another coordinator have the middle of its chain at `host`."""
    first, _, last = shards().stages
    async with served([first, last]) as ends:
        chain = RemoteChain([ends[0].address, host.address, ends[1].address], [], expected_of(shards()))
        await chain.connect()
        try:
            yield
        finally:
            await chain.aclose()


@pytest.mark.parametrize("why", ["another coordinator has it", "it may not dial the next", "it may not be dialled"])
@pytest.mark.parametrize("num_spares", [1, 2])
async def test_a_spare_that_is_refused_stands_in_no_ones_way(num_spares: int, why: str) -> None:
    text = await asyncio.to_thread(truth)
    shard = await asyncio.to_thread(spare, 1, "stages")
    async with served([*shards().stages, *[shard] * num_spares]) as hosts:
        own, spares = hosts[:3], hosts[3:]
        if why == "it may not dial the next":
            await _forbid(spares[0], own[2])
        elif why == "it may not be dialled":
            await _forbid(own[0], spares[0])
        addresses = [host.address for host in own], [host.address for host in spares]
        async with opened_over(shards(), own, spares, *addresses) as chain:
            assert await plain_text(chain.target, PROMPT, PARAMS, 2) == text[:2]
            is_in_use = why == "another coordinator has it"
            async with _using(spares[0]) if is_in_use else nullcontext():
                await own[1].stop()
                await _check_lost(chain)
            if num_spares == 1:
                await own[1].start()
                await mended(chain)
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            assert chain.link.statistics.spares_used == [host.address for host in spares[1:]]


async def _check_lost(chain: RemoteOpen) -> None:
    """Check that the second spare takes the place of the lost stage, or that the error names stage and spare."""
    link, spares = chain.link, chain.spares
    if len(spares) == 2:
        async with asyncio.timeout(LIMIT_S):
            while link.addresses[1] == chain.hosts[1].address:  # until its end is noticed
                await mended(chain)
                await asyncio.sleep(0.01)
        assert link.addresses[1] == spares[1].address
        return
    link.options = replace(link.options, reconnect_s=2.5)
    reason = rf"layers 1:2 is lost: .*{chain.hosts[1].address}.*{spares[0].address} does not help: The stage"
    async with asyncio.timeout(LIMIT_S):
        while re.search(reason, str(link.trouble)) is None:
            with suppress(WorkerUnreachable):
                await link.mend()
            await asyncio.sleep(0.01)
    assert link.spare_addresses == [spares[0].address]


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_chain_starts_with_a_spare_for_a_stage_that_is_away(index: int) -> None:
    text = await asyncio.to_thread(truth)
    shard = await asyncio.to_thread(spare, index, "stages")
    async with served([*shards().stages, shard]) as hosts:
        own, other = hosts[:3], hosts[3:]
        await own[index].stop()
        addresses = [host.address for host in own], [other[0].address]
        async with opened_over(shards(), own, other, *addresses) as chain:
            assert chain.link.statistics.spares_used == [other[0].address]
            assert await plain_text(chain.target, PROMPT, PARAMS, 3) == text[:3]
            await own[index].start()
            await other[0].stop()
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            assert chain.link.statistics.spares_used == [other[0].address, own[index].address]


async def test_a_chain_does_not_start_with_a_spare_of_other_layers() -> None:
    shard = await asyncio.to_thread(spare, 2, "stages")
    async with served([*shards().stages, shard]) as hosts:
        await hosts[1].stop()
        chain = RemoteChain([host.address for host in hosts[:3]], [hosts[3].address], expected_of(shards()))
        with pytest.raises(WorkerUnreachable, match=rf"{hosts[1].address} cannot be reached"):
            await chain.connect()
        assert chain.addresses == [host.address for host in hosts[:3]]
        await chain.aclose()
