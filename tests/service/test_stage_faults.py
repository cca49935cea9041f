"""Stages that are killed, restarted, replaced or hang, and links that damage: the same text, at a known price."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import DeadlineExceeded, WorkerUnreachable
from tests.support.processes import LIMIT_S
from tests.support.remote_chains import DamagingProxy, in_front_of, mended, once, opened_remote, proxy_port
from tests.support.rounds import plain_text
from tests.support.rpc_servers import wait_until
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, check_price, shards, spare, truth
from tests.support.stage_farm import patient

__all__ = ["patient"]  # a fixture

pytestmark = pytest.mark.usefixtures("patient")
PREFILL = (16, 24)
"""The second of three packets of the prompt, and the rows from there to its end."""
DECODE = (43, 1)
CASES = [(index, place) for index in range(3) for place in (PREFILL, DECODE)]


@pytest.mark.parametrize(("index", "place"), CASES)
async def test_a_restarted_stage_costs_what_it_held(index: int, place: tuple[int, int]) -> None:
    text = await asyncio.to_thread(truth)
    start, lost = place
    async with opened_remote(shards("stages"), window=1) as chain:
        host = chain.hosts[index]
        once(host, start, host.restart)
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
        check_price(chain, [("lost", lost), ("behind", start + lost)])
        assert host.num_starts == 2
        assert chain.link.statistics.num_reconnects == 1
        assert [other.stage.engine.statistics.num_behind for other in chain.hosts[:index]] == [0] * index


@pytest.mark.parametrize("index", [0, 2])
async def test_a_stage_restarted_between_rounds_costs_no_attempt(index: int) -> None:
    text = await asyncio.to_thread(truth)
    async with opened_remote(shards("coordinator")) as chain:
        target, link = chain.target, chain.link
        verify, rounds = target.verify, 0

        async def verify_after_a_restart(*args: object) -> object:
            nonlocal rounds
            rounds += 1
            if rounds == 5:
                await chain.hosts[index].restart()
                await wait_until(lambda: link.trouble is not None)
            return await verify(*args)  # type: ignore[arg-type]

        target.verify = verify_after_a_restart  # type: ignore[method-assign,assignment]
        assert await plain_text(target, PROMPT, PARAMS, TEXT_LENGTH) == text
        check_price(chain, [("behind", 44)])
        assert link.statistics.num_reconnects == 1


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
@pytest.mark.parametrize(("index", "place"), CASES[1::2])
async def test_a_spare_takes_over(index: int, place: tuple[int, int], ends: EndsAt) -> None:
    text = await asyncio.to_thread(truth)
    start, lost = place
    spares = [await asyncio.to_thread(spare, other, ends) for other in ((index + 1) % 3, index)]
    async with opened_remote(shards(ends), spares) as chain:
        host = chain.hosts[index]
        once(host, start, host.stop)
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
        check_price(chain, [("lost", lost), ("behind", start + lost)])
        assert chain.link.statistics.spares_used == [chain.spares[1].address]
        assert chain.link.addresses[index] == chain.spares[1].address
        assert not chain.spares[0].stage.seen


async def test_a_stage_that_returns_stands_by_as_a_spare() -> None:
    text = await asyncio.to_thread(truth)
    async with opened_remote(shards("stages"), [await asyncio.to_thread(spare, 1, "stages")]) as chain:
        first, second = chain.hosts[1], chain.spares[0]

        async def change_places() -> None:
            await first.start()
            await second.stop()

        once(first, 41, first.stop)
        once(second, 44, change_places)
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
        check_price(chain, [("lost", 1), ("behind", 42), ("lost", 1), ("behind", 45)])
        assert chain.link.statistics.spares_used == [second.address, first.address]


async def test_without_a_spare_the_error_names_the_stage_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = await asyncio.to_thread(truth)
    async with opened_remote(shards("stages"), link_options={"reconnect_s": 2.0}) as chain:
        assert await plain_text(chain.target, PROMPT, PARAMS, 2) == text[:2]
        host = chain.hosts[1]
        await host.stop()
        await wait_until(lambda: chain.link.trouble is not None)
        monkeypatch.setattr("specsplit.stages.wire.connector.AGAIN_S", LIMIT_S)
        async with asyncio.timeout(9):  # what is known to be lost is waited for no longer than `reconnect_s`
            tries: list[int] = []
            for _ in range(2):
                with pytest.raises(WorkerUnreachable, match=rf"layers 1:2 is lost: The stage at {host.address}"):
                    await plain_text(chain.target, PROMPT, PARAMS, 1)
                tries.append(chain.link.statistics.num_tries)
        assert tries[0] == tries[1] > 0, "known to be down, it is not asked again"
        assert [len(other.stage.seen) for other in chain.hosts] == [4, 4, 4]
        monkeypatch.undo()
        await host.start()
        async with asyncio.timeout(LIMIT_S):
            await mended(chain)
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text


@pytest.mark.parametrize("damaged", [1, 5])
@pytest.mark.parametrize("hop", range(4))
async def test_a_damaged_packet_is_sent_again(hop: int, damaged: int) -> None:
    """Packets 0 to 2 are the prompt's; the damage is done on the way to stage `hop`, or on the last one's way back."""
    text = await asyncio.to_thread(truth)
    index = min(hop, 2)
    async with AsyncExitStack() as stack:
        proxies: list[DamagingProxy] = []

        def through_proxies(addresses: list[str]) -> list[str]:
            port = int(addresses[index].rpartition(":")[2])
            proxies.append(DamagingProxy(port, lambda number, is_sent: (number, is_sent) == (damaged, hop < 3)))
            addresses[index] = f"127.0.0.1:{free_port}"
            return addresses

        free_port = await proxy_port(stack, proxies)
        async with opened_remote(shards("stages"), addresses=through_proxies, window=1) as chain:
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            price = [("corrupt", 24 if damaged == 1 else 1)]
            if (hop, damaged) == (3, 1):
                price = []  # the answer to the prompt's last packet says that every stage has its rows
            check_price(chain, price)
            assert chain.link.statistics.num_reconnects == 0
            assert [host.num_starts for host in chain.hosts] == [1, 1, 1]


async def test_a_stage_whose_device_hangs_is_an_error_after_one_deadline() -> None:
    async with opened_remote(shards("stages"), link_options={"call_timeout_s": 0.1}) as chain:
        chain.hosts[1].hangs = lambda packet: True
        with pytest.raises(DeadlineExceeded, match="no answer within"):
            await plain_text(chain.target, PROMPT[:9], PARAMS, 1)
        assert chain.runner.chain_statistics.num_packets == 2
        assert chain.resent == [("lost", 9)]


async def test_a_link_that_is_cut_costs_only_what_was_under_way() -> None:
    text = await asyncio.to_thread(truth)
    async with AsyncExitStack() as stack:
        through_proxy, proxies, _ = await in_front_of(stack, 1, DamagingProxy)
        async with opened_remote(shards("stages"), addresses=through_proxy) as chain:
            once(chain.hosts[1], 43, proxies[0].cut)
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            check_price(chain, [("lost", 1)])
            assert chain.link.statistics.num_reconnects == 1
