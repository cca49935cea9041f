"""Packets that come twice, late or in another order over real links: the same text, and exactly what is sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest

from tests.support.packet_proxy import LinkFault
from tests.support.processes import LIMIT_S
from tests.support.remote_chains import RemoteOpen, give_up_soon
from tests.support.rounds import plain_text
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, check_price, shards, spare, truth
from tests.support.stage_farm import Farm, farm_of, patient

__all__ = ["patient"]  # a fixture

pytestmark = pytest.mark.usefixtures("patient")
WAY_BACK = 3
"""The hop behind the last stage; hop h before it leads to stage h."""
PREFILL, DECODE = 2, 6
"""Packets by their request ids: the second of the prompt's three (rows 16 to 31), and the one of row 42."""


@asynccontextmanager
async def disturbed(
    request_id: int, hop: int, fault: LinkFault, **options: Any
) -> AsyncIterator[tuple[Farm, RemoteOpen]]:
    """Open a target over three stages on whose links one packet suffers a fault; no spare stands by."""

    def fate(number: int, at: int) -> str | None:
        return fault if (number, at) == (request_id, hop) else None

    parts = await asyncio.to_thread(shards, "stages")
    spares = [await asyncio.to_thread(spare, index, "stages") for index in range(WAY_BACK)]
    async with (
        farm_of(parts, spares) as farm,
        farm.opened(fate, has_spares=False, **{"window": 1, **options}) as chain,
    ):
        yield farm, chain


async def check_text(farm: Farm, chain: RemoteOpen, fault: LinkFault) -> None:
    text = await asyncio.to_thread(truth)
    async with asyncio.timeout(LIMIT_S):
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
    assert farm.fired == [fault]


@pytest.mark.parametrize("request_id", [PREFILL, DECODE])
@pytest.mark.parametrize("hop", range(4))
async def test_a_packet_that_comes_twice_costs_nothing(hop: int, request_id: int) -> None:
    async with disturbed(request_id, hop, "twice") as (farm, chain):
        await check_text(farm, chain, "twice")
        check_price(chain, [])
        assert chain.link.statistics.num_late == 1
        computed = [host.stage.engine.statistics.num_packets for host in chain.hosts]
        assert computed == [10] * hop + [11] * (3 - hop)


@pytest.mark.parametrize(("request_id", "rows"), [(1, 40), (DECODE, 3)])
@pytest.mark.parametrize("hop", range(4))
async def test_a_packet_repeated_behind_later_ones_rolls_back_to_its_start(
    hop: int, request_id: int, rows: int
) -> None:
    """It comes in front of the next but one, whose rows end at 40 or at 45."""
    async with disturbed(request_id, hop, "again-later") as (farm, chain):
        await check_text(farm, chain, "again-later")
        check_price(chain, [("behind", rows)] if hop < WAY_BACK else [])
        behind = [host.stage.engine.statistics.num_behind for host in chain.hosts]
        assert behind == [int(index == hop) for index in range(3)]


@pytest.mark.parametrize("request_id", [PREFILL, DECODE])
@pytest.mark.parametrize("hop", range(4))
async def test_a_packet_that_comes_late_costs_nothing_but_time(hop: int, request_id: int) -> None:
    async with disturbed(request_id, hop, "delayed") as (farm, chain):
        await check_text(farm, chain, "delayed")
        check_price(chain, [])
        assert (chain.link.statistics.num_late, chain.link.statistics.num_reconnects) == (0, 0)


LATE = [(1, PREFILL), (WAY_BACK, PREFILL), (WAY_BACK, DECODE)]
"""Hop and request id of packets that come after their deadline; the other places are tested by `make test-all`."""
ALSO_LATE = [place for place in product(range(4), (PREFILL, DECODE)) if place not in LATE]


@pytest.mark.parametrize(
    ("hop", "request_id"), [*LATE, *(pytest.param(*place, marks=pytest.mark.slow) for place in ALSO_LATE)]
)
async def test_a_packet_past_its_deadline_is_sent_again_and_then_refused(hop: int, request_id: int) -> None:
    rows = {PREFILL: 24, DECODE: 1}[request_id]
    async with disturbed(request_id, hop, "delayed") as (farm, chain):
        give_up_soon(chain.link, lambda packet: packet.request_id == request_id)
        goes_on = asyncio.Event()
        for proxy in farm.proxies:
            proxy.delay = goes_on.wait
        chain.hosts[2].hangs = lambda packet: goes_on.set() if packet.request_id > request_id + 1 else None
        await check_text(farm, chain, "delayed")
        is_answered_by_the_next = (hop, request_id) == (WAY_BACK, PREFILL)
        check_price(chain, [] if is_answered_by_the_next else [("lost", rows)])
        assert chain.link.statistics.num_reconnects == 1


@pytest.mark.parametrize("hop", range(4))
async def test_packets_of_a_prompt_that_swap_places_are_sent_again_in_order(hop: int) -> None:
    async with disturbed(1, hop, "swapped", window=8) as (farm, chain):
        for proxy in farm.proxies:
            proxy.swap_s = 10.0
        await check_text(farm, chain, "swapped")
        check_price(chain, [("behind", 40)] if hop < WAY_BACK else [])
        assert (chain.link.statistics.num_late, chain.link.statistics.num_reconnects) == (0, 0)
