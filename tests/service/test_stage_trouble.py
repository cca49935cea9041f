"""Chains that cannot be restored although every stage answers: what is said of them, and logged."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from specsplit.core.errors import PeerMismatch, WorkerUnreachable
from specsplit.stages.chain_log import ChainLog
from specsplit.stages.wire.connection import Connection
from specsplit.stages.wire.frames import LEAVING, ChainId
from specsplit.stages.wire.next_stage import NextUnreachable
from specsplit.stages.wire.peer import StagePeer
from tests.support.remote_chains import opened_remote, served
from tests.support.rpc_servers import wait_until
from tests.support.small_target import shards


async def test_the_log_tells_why_a_chain_is_lost_and_why_it_stays_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "specsplit.stages.chain_log")
    trying, may_fail = asyncio.Event(), asyncio.Event()

    async def refused(connection: Connection, **options: Any) -> None:
        trying.set()
        await may_fail.wait()
        raise PeerMismatch("The stage at b:1 refuses: it serves another coordinator.")

    async with opened_remote(shards(bounds=(1,))) as chain:
        log = ChainLog(chain.link, chain.runner)
        log.write_new()
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "open", refused)
            chain.link.lose(WorkerUnreachable("Stage 0 cannot reach stage 1 at b:1; its own log says why."))
            mending = asyncio.create_task(chain.link.mend())
            await trying.wait()
            log.write_new()
            log.write_new()
            may_fail.set()
            with pytest.raises(PeerMismatch):
                await mending
            log.write_new()
            assert isinstance(chain.link.trouble, PeerMismatch)
    assert [record.message for record in caplog.records if record.name.endswith("chain_log")] == [
        "the chain is not whole: Stage 0 cannot reach stage 1 at b:1; its own log says why.",
        "the chain is not whole: The stage at b:1 refuses: it serves another coordinator.",
    ]


async def test_a_last_stage_that_reports_the_next_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_remote(shards(bounds=(1,))) as chain:
        stream, last = StagePeer.stream, chain.link.addresses[-1]

        async def lie(peer: StagePeer, chain_id: ChainId) -> Any:
            if peer.address == last:
                raise NextUnreachable("The stage cannot reach the next one.")
            return await stream(peer, chain_id)

        with monkeypatch.context() as patched:
            patched.setattr(StagePeer, "stream", lie)
            chain.link.lose(WorkerUnreachable("A stream was cut."))
            mending = asyncio.create_task(chain.link.mend())
            said = f"The stage at {last} opens no stream"
            await wait_until(lambda: mending.done() or said in str(chain.link.trouble))
        await mending
        assert chain.link.trouble is None


async def test_a_chain_that_ends_on_purpose_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    whole = shards("stages", (2,))  # a load is logged, too
    caplog.clear()
    caplog.set_level(logging.INFO)
    chain = ChainId("me", 1)
    async with served(whole.stages) as hosts:
        peers = [StagePeer(host.address) for host in hosts]
        try:
            await peers[0].configure(chain, 0, 2, peers[1].address, keep_slots=False)
            await peers[1].configure(chain, 1, 2, "", keep_slots=False)
            streams = [await peer.stream(chain) for peer in peers]
            # The last stage hears of it first, as happens when both are told at once.
            await streams[1].write(LEAVING)
            told = await streams[0].read()
            await streams[0].write(LEAVING)
        finally:
            for peer in peers:
                await peer.aclose()
    assert told is not None, "a coordinator that is still there learns that the chain is broken"
    assert caplog.messages == []
