"""The drain of a server: who is still answered, how long, and what it says that it cut."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from specsplit.core.errors import WorkerUnreachable
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeTarget, Faults
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import LOOPBACK, NOT_SERVING, SERVING, health_of, verifier_at, wait_until


async def test_draining_refuses_new_calls_and_lets_running_ones_end():
    gate = asyncio.Event()
    target = FakeTarget(Faults(gate=gate))
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        running = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await wait_until(lambda: target.num_under_way == 1)
        waiting = asyncio.create_task(server.wait())
        drain = asyncio.create_task(server.drain(2 * LIMIT_S))
        async with grpc.aio.insecure_channel(server.address) as channel:
            names = ("readiness", "", "specsplit.v1.TargetService", "liveness")
            health = [await health_of(channel, name) for name in names]
        assert health == [NOT_SERVING, NOT_SERVING, NOT_SERVING, SERVING]
        with pytest.raises(WorkerUnreachable, match="shutting down"):
            await verifier.ping()
        assert not running.done()
        gate.set()
        assert len((await running).token_ids) == 1
        await drain
        await waiting
        with pytest.raises(WorkerUnreachable):
            await verifier.ping()


async def test_a_draining_worker_goes_on_with_its_sessions_and_opens_none():
    target = FakeTarget()
    service = TargetService(target, lambda: len(target.slots))
    async with serving(LOOPBACK, [service]) as server, verifier_at(server) as verifier:
        script = Script()
        first = script.first()
        ids = [*PROMPT, (await verifier.verify(first, without_tree(first))).bonus_token]
        drain = asyncio.create_task(server.drain(2 * LIMIT_S))
        await asyncio.sleep(0)
        turn = script.turn(ids, len(ids) - 1)
        assert len((await verifier.verify(turn, without_tree(turn))).token_ids) == 1
        with pytest.raises(WorkerUnreachable, match="shutting down"):
            await verifier.verify(new := Script().first(), without_tree(new))
        assert not drain.done()
        await verifier.close(script.session)
        async with asyncio.timeout(LIMIT_S):
            await drain


async def test_a_drain_does_not_wait_beyond_its_grace():
    target = FakeTarget(Faults(gate=asyncio.Event()))
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        running = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await wait_until(lambda: target.num_under_way == 1)
        async with asyncio.timeout(LIMIT_S):
            assert await server.drain(0.05) == 1, "one answer was cut"
        with pytest.raises(WorkerUnreachable):
            await running
        assert (target.num_under_way, server.num_running) == (0, 0)


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_session_cut_by_a_drain_is_not_put_down_to_its_client(
    is_idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specsplit.sessions")
    target = FakeTarget(Faults(gate=None if is_idle else asyncio.Event()))
    service = TargetService(target, lambda: len(target.slots))
    async with serving(LOOPBACK, [service]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        running = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await wait_until(lambda: running.done() if is_idle else target.num_under_way == 1)
        assert await server.drain(0.05) == 1
        await asyncio.gather(running, return_exceptions=True)
    lost = [record.getMessage() for record in caplog.records if "lost session" in record.getMessage()]
    assert lost
    assert all(line.endswith(": the worker has stopped") for line in lost)


async def test_a_session_whose_client_leaves_is_put_down_to_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specsplit.sessions")
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        async with verifier_at(server) as verifier:
            turn = Script().first()
            await verifier.verify(turn, without_tree(turn))
        await wait_until(lambda: caplog.text.count("lost session") == 1)
    assert "its client has vanished" in caplog.text


async def test_a_text_that_a_drain_ends_between_two_rounds_is_counted():
    target, script = FakeTarget(), Script()
    async with (
        serving(LOOPBACK, [TargetService(target, lambda: len(target.slots))]) as server,
        verifier_at(server) as verifier,
    ):
        first = script.first()
        await verifier.verify(first, without_tree(first))
        assert await server.drain(0.05) == 1
