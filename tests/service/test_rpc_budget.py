"""How many bytes of requests one server takes on at once, whoever sends them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from specsplit.core.errors import NoFreeSlot
from specsplit.core.types import Identity
from specsplit.orchestrator.pipeline import Orchestrator
from specsplit.orchestrator.records import Speculation
from specsplit.rpc.budget import SMALL_BYTES, ByteBudget
from specsplit.rpc.server import serving
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import decode_plainly, without_tree
from tests.fakes import FakeTarget, FakeTokenizer, Faults
from tests.flaky import collect, request
from tests.rpc_servers import LOOPBACK, verifier_at, wait_until

LARGE = (1 << 31,) * (2 * SMALL_BYTES // 5)
"""Tokens of a tail of twice the size that counts as small."""


def test_large_requests_leave_room_for_small_ones_and_nothing_goes_beyond_the_limit():
    budget = ByteBudget(8 * SMALL_BYTES)
    with budget.held(6 * SMALL_BYTES):
        with pytest.raises(NoFreeSlot, match="try again"), budget.held(SMALL_BYTES + 1):
            pass
        with budget.held(SMALL_BYTES), budget.held(SMALL_BYTES):
            assert budget.num_used == 8 * SMALL_BYTES
            with pytest.raises(NoFreeSlot), budget.held(1):
                pass
    assert budget.num_used == 0


def test_one_request_alone_has_room_whatever_its_size_and_gives_it_back_when_it_fails():
    budget = ByteBudget(10)
    with pytest.raises(ValueError, match="the request's own"), budget.held(1000):
        raise ValueError("the request's own")
    with budget.held(5), budget.held(5):
        pass


async def test_a_request_too_many_is_refused_before_it_is_parsed_over_all_connections():
    gate = asyncio.Event()
    target = FakeTarget(Faults(gate=gate))
    async with (
        serving(listen=LOOPBACK, verifier=target, max_request_bytes=4 * SMALL_BYTES) as server,
        verifier_at(server) as one,
        verifier_at(server) as other,
    ):
        large = replace(Script().first(), tail=LARGE)
        held = asyncio.create_task(one.verify(large, without_tree(large)))
        await wait_until(lambda: target.num_under_way == 1)
        with pytest.raises(NoFreeSlot, match="try again in a moment"):
            await other.verify(large, without_tree(large))
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.unary_unary("/specsplit.v1.TargetService/VerifyDrafts")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(b"\xff" * (2 * SMALL_BYTES))  # no message at all
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await other.ping()).role == "target"
        assert target.num_under_way == 1
        held.cancel()
        await wait_until(lambda: server.num_running == 0)
        gate.set()
        assert len(await decode_plainly(other, PROMPT, 2)) == 2


async def test_an_orchestrator_asks_again_until_there_is_room(monkeypatch: pytest.MonkeyPatch):
    target, gate, refused = FakeTarget(), asyncio.Event(), asyncio.Event()
    target.faults.gate = gate
    async with (
        serving(listen=LOOPBACK, verifier=target, max_request_bytes=64) as server,
        verifier_at(server) as other,
        verifier_at(server) as verifier,
    ):
        large = replace(Script().first(), tail=(1 << 31,) * 100)
        held = asyncio.create_task(other.verify(large, without_tree(large)))
        await wait_until(lambda: target.num_under_way == 1)
        ping = verifier.ping

        async def watched_ping() -> Identity:
            try:
                return await ping()
            except NoFreeSlot:
                refused.set()
                raise

        monkeypatch.setattr(verifier, "ping", watched_ping)
        owner = Orchestrator(verifier, None, FakeTokenizer(), Speculation(mode="plain"))
        texting = asyncio.create_task(collect(owner, request(tokens=8)))
        await refused.wait()
        held.cancel()
        gate.set()
        _, result = await texting
        await owner.aclose()
    assert {(phase.worker, phase.reason) for phase in result.degraded} == {("target", "full")}
