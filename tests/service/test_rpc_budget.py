"""How many bytes of requests one server takes on at once, whoever sends them."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest

from specsplit.core.errors import InvalidRequest, NoFreeSlot
from specsplit.core.types import ROOT, Identity, Proposal, SamplingParams, SessionParams, StreamLimits, Turn
from specsplit.limits import MAX_NODES, MAX_NUMBER, SMALL_BYTES
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.rpc import calls
from specsplit.rpc.budget import ByteBudget
from specsplit.rpc.interceptors import Boundary
from specsplit.rpc.pb import target_pb2
from specsplit.rpc.server import ServerLimits, serving
from specsplit.rpc.servicers import TargetService
from specsplit.rpc.transport import largest_request
from specsplit.speculation.options import Speculation
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import decode_plainly, without_tree
from tests.support.fakes import FakeTarget, FakeTokenizer, Faults
from tests.support.flaky import collect, request
from tests.support.rpc_servers import LOOPBACK, duplex_status, verifier_at, wait_until

LARGE = (1 << 31,) * (2 * SMALL_BYTES // 5)
"""Tokens of a tail of twice the size that counts as small."""


def test_large_requests_leave_room_for_small_ones_within_the_limit():
    budget = ByteBudget(8 * SMALL_BYTES)
    assert budget.take(6 * SMALL_BYTES)
    assert not budget.take(SMALL_BYTES + 1)
    assert budget.take(SMALL_BYTES)
    assert budget.take(SMALL_BYTES)
    assert not budget.take(1)
    assert budget.num_used == 8 * SMALL_BYTES
    for size in (6, 1, 1):
        budget.give_back(size * SMALL_BYTES)
    assert budget.num_used == 0


def test_one_request_alone_has_room_whatever_its_size():
    budget = ByteBudget(10)
    assert budget.take(1000)
    assert not budget.take(1)


@pytest.mark.parametrize(("context", "vocab_size"), [(128, 320), (4096, 32_000), (131_072, 152_064)])
def test_the_largest_request_that_a_model_takes_fits_and_little_more(context: int, vocab_size: int):
    biases = tuple((token_id, -0.1) for token_id in range(vocab_size))
    scored = calls.encode_score_request((vocab_size - 1,) * (context - 1), (1,), biases).ByteSize()
    params = SessionParams(SamplingParams(logit_bias=biases), eos_ids=(vocab_size - 1,) * 100)
    turn = Turn("k" * 64, 1 << 31, 1 << 31, 0, 0, (vocab_size - 1,) * context, params)
    tree = Proposal(1 << 31, context, (vocab_size - 1,) * 4096, (1,) * 4096, (-1.0,) * 4096)
    verified = calls.encode_verify_request(turn, tree).ByteSize()
    assert max(scored, verified) < largest_request(context, vocab_size) < 3 * max(scored, verified) + (1 << 20)


async def test_a_request_that_can_never_fit_is_refused_unreceived():
    async with (
        serving(LOOPBACK, [TargetService(FakeTarget())], ServerLimits(max_message_bytes=100_000)) as server,
        verifier_at(server) as verifier,
    ):
        turn = replace(Script().first(), tail=(1 << 31,) * 25_000)
        with pytest.raises(InvalidRequest, match="too large"):
            await verifier.verify(turn, without_tree(turn))
        with pytest.raises(InvalidRequest, match="the tail"):
            await verifier.verify(turn := replace(turn, tail=(1 << 31,) * 15_000), without_tree(turn))
        assert len(await decode_plainly(verifier, PROMPT, 2)) == 2


async def test_a_later_message_of_a_stream_is_small_or_refused():
    turn = Script().first()
    opening = calls.encode_open(turn, StreamLimits(4, 2, 2)).SerializeToString()
    ids = (1 << 31,) * MAX_NODES
    largest = Proposal(MAX_NUMBER - MAX_NODES, 1 << 31, ids, (ROOT,) * MAX_NODES, (-1.0,) * MAX_NODES)
    assert calls.encode_propose(largest, is_more_coming=True).ByteSize() < SMALL_BYTES
    propose = calls.encode_propose(Proposal(1, len(PROMPT)), is_more_coming=True).SerializeToString()
    cancel = target_pb2.VerifyStreamRequest(cancel=target_pb2.Cancel(frees_slot=True)).SerializeToString()
    async with (
        serving(LOOPBACK, [TargetService(FakeTarget())]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        begin = channel.stream_stream("/specsplit.v1.TargetService/VerifyStream")
        most = SMALL_BYTES // len(propose)
        # The same field again and again is a valid message of any size.
        for number, code in ((most, grpc.StatusCode.OK), (most + 1, grpc.StatusCode.INVALID_ARGUMENT)):
            assert await duplex_status(begin, opening, propose * number, cancel) is code


class Decoded:
    """What a request was decoded to."""


async def test_a_refused_request_is_freed_before_its_status_is_sent():
    alive: list[bool] = []
    decoded: list[weakref.ref[Decoded]] = []

    async def refuse(request: bytes, context: object) -> bytes:
        held = Decoded()
        decoded.append(weakref.ref(held))
        raise InvalidRequest("no")

    class Context:
        async def abort_with_status(self, status: grpc.Status) -> None:
            alive.append(decoded[0]() is not None)

        def auth_context(self) -> dict[str, list[bytes]]:
            return {}

        def peer(self) -> str:
            return "ipv4:127.0.0.1:5000"

    async def continuation(details: object) -> object:
        return grpc.unary_unary_rpc_method_handler(refuse)  # type: ignore[arg-type]

    details = SimpleNamespace(method="/specsplit.v1.TargetService/Score", invocation_metadata=())
    handler = await Boundary(10.0).intercept_service(continuation, details)  # type: ignore[arg-type]
    assert handler is not None
    await handler.unary_unary(b"request", Context())  # type: ignore[misc, arg-type]
    assert alive == [False]


async def test_one_request_too_many_is_refused_over_all_connections():
    gate = asyncio.Event()
    target = FakeTarget(Faults(gate=gate))
    async with (
        serving(LOOPBACK, [TargetService(target)], ServerLimits(max_request_bytes=4 * SMALL_BYTES)) as server,
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
        serving(LOOPBACK, [TargetService(target)], ServerLimits(max_request_bytes=64)) as server,
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
