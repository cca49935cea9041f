"""Stages that hang while they answer, or that only their neighbour cannot reach: a spare, or an error that says so."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from specsplit.core.errors import SpecSplitError, WorkerUnreachable
from specsplit.core.sections import TargetSettings
from specsplit.rpc.channel import Duplex
from specsplit.rpc.clients import RemoteVerifier
from specsplit.stages import serve
from specsplit.stages.loading import Coordinator
from specsplit.stages.packet import Packet
from specsplit.stages.serve import RECONNECT_S, serving_chain
from specsplit.stages.wire.next_stage import NextLink
from specsplit.stages.wire.remote_chain import RemoteChain
from tests.support.disturbed import check_noticed
from tests.support.processes import LIMIT_S, SILENT_S
from tests.support.remote_chains import (
    DamagingProxy,
    expected_of,
    give_up_soon,
    in_front_of,
    mended,
    once,
    opened_remote,
    served,
)
from tests.support.rounds import plain_text
from tests.support.rpc_servers import LOOPBACK, wait_until
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, check_price, shards, spare, truth
from tests.support.stage_farm import patient

__all__ = ["patient"]  # a fixture


class Freezable(DamagingProxy):
    """A proxy that can fall silent: connections stay open and nothing comes through, as of a stopped process."""

    frozen = False

    def _damaged(self, data: bytearray, is_sent: bool) -> bytes:
        return b"" if self.frozen else bytes(data)

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.frozen:
            await super().serve_connection(reader, writer)


async def test_a_stage_that_hangs_is_replaced_after_a_keepalive() -> None:
    text = await asyncio.to_thread(truth)
    async with AsyncExitStack() as stack:
        through_proxy, proxies, _ = await in_front_of(stack, 1, Freezable)
        spares = [await asyncio.to_thread(spare, 1, "stages")]
        async with opened_remote(shards("stages"), spares, addresses=through_proxy) as chain:
            (proxy,) = proxies

            def freeze() -> None:
                proxy.frozen = True

            once(chain.hosts[1], 43, freeze)
            async with asyncio.timeout(SILENT_S):
                assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            check_price(chain, [("lost", 1), ("behind", 44)])


async def test_a_stage_that_falls_silent_is_trouble_within_three_seconds() -> None:
    async def silence_s() -> float:
        """Return how long a stage is silent until that is trouble."""
        async with AsyncExitStack() as stack:
            through_proxy, proxies, _ = await in_front_of(stack, 1, Freezable)
            async with opened_remote(shards("stages"), addresses=through_proxy) as chain:
                proxies[0].frozen = True
                began_s = time.monotonic()
                await wait_until(lambda: chain.link.trouble is not None)
                return time.monotonic() - began_s

    await check_noticed(silence_s)


@pytest.mark.parametrize("finds_it", ["deadline", "look"])
async def test_a_stage_whose_device_hangs_while_it_answers_is_replaced(finds_it: str) -> None:
    text = await asyncio.to_thread(truth)
    spares = [await asyncio.to_thread(spare, 1, "stages")]
    async with opened_remote(shards("stages"), spares) as chain:
        host, stuck = chain.hosts[1], asyncio.Event()
        give_up_soon(chain.link, lambda packet: finds_it == "deadline" and packet.sessions[0].start == 43)

        def hangs(packet: Packet) -> bool:
            if packet.sessions[0].start == 43:
                chain.link.options = replace(chain.link.options, step_timeout_s=0.3)
                stuck.set()
            return stuck.is_set()

        async def look() -> None:
            await stuck.wait()
            while not chain.link.statistics.spares_used:
                await chain.link.look()
                await asyncio.sleep(0.01)

        host.hangs = hangs
        looking = asyncio.create_task(look() if finds_it == "look" else stuck.wait())
        async with asyncio.timeout(LIMIT_S):
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            await looking
        check_price(chain, [("lost", 1), ("behind", 44)])
        assert chain.link.statistics.spares_used == [chain.spares[0].address]


async def test_a_stage_that_hangs_is_trouble_until_it_is_replaced() -> None:
    options = {"step_timeout_s": 0.1, "reconnect_s": 2.5}
    stuck = asyncio.Event()
    async with opened_remote(shards("stages"), link_options=options) as chain:
        chain.hosts[1].hangs = lambda packet: stuck.set() or True
        writing = asyncio.create_task(plain_text(chain.target, PROMPT[:9], PARAMS, 1))
        async with asyncio.timeout(LIMIT_S):
            await stuck.wait()
            while chain.link.trouble is None:
                await chain.link.look()
                await asyncio.sleep(0.01)
            assert re.search(f"{chain.hosts[1].address} hangs", str(chain.link.trouble))
            with pytest.raises(WorkerUnreachable, match=f"layers 1:2 is lost: .*{chain.hosts[1].address} hangs"):
                await writing


@pytest.mark.parametrize("helps", [True, False])
async def test_a_stage_unreachable_for_its_neighbour_is_replaced_if_that_helps(
    helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = await asyncio.to_thread(truth)
    spares = [await asyncio.to_thread(spare, 1, "stages")]
    options = {} if helps else {"reconnect_s": 2.5}
    async with opened_remote(shards("stages"), spares, link_options=options) as chain:
        assert await plain_text(chain.target, PROMPT, PARAMS, 2) == text[:2]
        addresses, open_next = chain.link.addresses, NextLink.open

        async def open_or_not(link: NextLink) -> Duplex:
            if link.name.endswith(addresses[1]) or (link.name.startswith("Stage 0") and not helps):
                raise WorkerUnreachable(f"{link.name}: nobody answers.")
            return await open_next(link)

        monkeypatch.setattr(NextLink, "open", open_or_not)
        chain.link.lose(WorkerUnreachable("The link between stage 0 and stage 1 was cut."))
        if helps:
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            assert chain.link.statistics.spares_used == [chain.spares[0].address]
            return
        with pytest.raises(WorkerUnreachable, match=r"Stage 0 cannot reach stage 1 at 127\.0\.0\.1:\d+;"):
            await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH)
        assert (chain.link.addresses, chain.link.statistics.spares_used) == (addresses, [])
        monkeypatch.setattr(NextLink, "open", open_next)
        async with asyncio.timeout(LIMIT_S):
            await mended(chain)
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text


async def test_a_broken_link_between_stages_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage tells nobody where the next one is; its coordinator knows."""

    async def broken(link: NextLink, packet: Packet) -> None:
        raise WorkerUnreachable("Stage 0 cannot reach stage 1; its own log says why.")

    async with opened_remote(shards("stages"), link_options={"reconnect_s": 4.0}) as chain:
        monkeypatch.setattr(NextLink, "write", broken)
        following = re.escape(chain.link.addresses[1])
        with pytest.raises(WorkerUnreachable, match=rf"Stage 0 cannot reach stage 1 at {following};"):
            await plain_text(chain.target, PROMPT, PARAMS, 1)


class Refusing(DamagingProxy):
    """A proxy that breaks the second connection to it off, which is that of the stage before."""

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.num_connections == 1:
            self.num_connections += 1
            writer.transport.abort()
            return
        await super().serve_connection(reader, writer)


async def test_a_link_between_stages_lost_at_the_beginning_is_made_again() -> None:
    text = await asyncio.to_thread(truth)
    async with AsyncExitStack() as stack:
        through_proxy, proxies, _ = await in_front_of(stack, 1, Refusing)
        async with opened_remote(shards("stages"), addresses=through_proxy) as chain:
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            assert chain.resent == []
            assert proxies[0].num_connections > 2


IN_CI = [(True, 0), (True, 2), (False, 1)]
IN_ALL = [(True, 1), (False, 0), (False, 2)]


@pytest.mark.parametrize(
    ("has_spare", "index"), [*IN_CI, *(pytest.param(*case, marks=pytest.mark.slow) for case in IN_ALL)]
)
async def test_a_stage_silent_in_the_prefill_is_replaced_or_an_error(index: int, has_spare: bool) -> None:
    """It falls silent before the second of the prompt's three packets, of which the first was answered."""
    text = await asyncio.to_thread(truth)
    async with AsyncExitStack() as stack:
        through_proxy, proxies, _ = await in_front_of(stack, index, Freezable)
        spares = [await asyncio.to_thread(spare, index, "stages")] if has_spare else []
        options = {} if has_spare else {"reconnect_s": 3.0}
        async with opened_remote(
            shards("stages"), spares, addresses=through_proxy, link_options=options, window=1
        ) as chain:
            (proxy,) = proxies

            def freeze() -> None:
                proxy.frozen = True

            once(chain.hosts[index], 16, freeze)
            if has_spare:
                async with asyncio.timeout(SILENT_S):
                    assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
                check_price(chain, [("lost", 24), ("behind", 40)])
                assert chain.link.statistics.spares_used == [chain.spares[0].address]
                return
            async with asyncio.timeout(SILENT_S):
                with pytest.raises(WorkerUnreachable, match=rf"{chain.link.addresses[index]}\b"):
                    await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH)
            assert (chain.resent, chain.runner.chain_statistics.recomputed_tokens) == ([], 0)
            proxy.frozen = False
            async with asyncio.timeout(LIMIT_S):
                await mended(chain)
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            assert chain.resent == []


@pytest.mark.usefixtures("patient")  # no attempt to connect, and no ping, ends before `reconnect_s`
async def test_an_error_names_the_stage_whose_answer_is_awaited() -> None:
    async with AsyncExitStack() as stack:
        through_proxy, proxies, port = await in_front_of(stack, 1, Freezable)
        options = {"reconnect_s": 2.5}
        async with opened_remote(shards("stages"), addresses=through_proxy, link_options=options) as chain:
            (proxy,) = proxies
            proxy.frozen = True
            chain.link.lose(WorkerUnreachable("A link was cut."))
            with pytest.raises(WorkerUnreachable, match=rf"in 2.5 s. The stage at 127.0.0.1:{port} gave no answer.$"):
                await chain.link.mend()
            proxy.frozen = False


async def test_a_spare_that_comes_late_still_replaces_a_silent_stage() -> None:
    text = await asyncio.to_thread(truth)
    async with AsyncExitStack() as stack:
        through_proxy, proxies, _ = await in_front_of(stack, 1, Freezable)
        spares, options = [await asyncio.to_thread(spare, 1, "stages")], {"reconnect_s": RECONNECT_S}
        async with opened_remote(shards("stages"), spares, addresses=through_proxy, link_options=options) as chain:
            (proxy,) = proxies
            await chain.spares[0].stop()
            proxy.frozen = True
            chain.link.lose(WorkerUnreachable("A link was cut."))
            with pytest.raises(WorkerUnreachable, match=r"is lost|could not be restored"):
                await chain.link.mend()
            await chain.spares[0].start()
            async with asyncio.timeout(LIMIT_S):
                await mended(chain, RECONNECT_S)
            assert chain.link.statistics.spares_used == [chain.spares[0].address]
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text


async def test_a_stage_that_hangs_does_not_hold_up_the_end_of_its_target() -> None:
    parts, stuck = shards("stages"), asyncio.Event()
    async with served(parts.stages) as hosts:
        coordinator = Coordinator(parts.model, parts.ends, expected_of(parts), ())
        stages = tuple(host.address for host in hosts)
        settings = TargetSettings(stages=stages, sessions=4, context=160, step_timeout=1000.0, listen=LOOPBACK)
        async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
            async with serving_chain(coordinator, settings) as server:
                verifier = RemoteVerifier(server.address)
                stack.push_async_callback(verifier.aclose)
                hosts[1].hangs = lambda packet: stuck.set() or True
                writing = asyncio.create_task(plain_text(verifier, PROMPT, PARAMS, 1))
                await stuck.wait()
            with pytest.raises(SpecSplitError):
                await writing


async def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, num_looks = shards("stages"), 0

    async def look(chain: RemoteChain) -> None:
        nonlocal num_looks
        num_looks += 1
        raise OSError("The weights' index cannot be read.")

    monkeypatch.setattr(RemoteChain, "look", look)
    monkeypatch.setattr(serve, "LOOK_S", 0.01)
    async with served(parts.stages) as hosts:
        coordinator = Coordinator(parts.model, parts.ends, expected_of(parts), ())
        stages = tuple(host.address for host in hosts)
        settings = TargetSettings(stages=stages, sessions=4, context=160, listen=LOOPBACK)
        async with serving_chain(coordinator, settings):
            before = num_looks
            await wait_until(lambda: num_looks > before + 2)
