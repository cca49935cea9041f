"""Damage on the way between orchestrator and target: it is found, and changes no token and blames no user."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

import grpc
import pytest

from specsplit.core.errors import InvalidRequest, WorkerFailed
from specsplit.core.types import SessionParams, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, RetryPolicy
from specsplit.rpc import calls
from specsplit.rpc.channel import Duplex, WorkerChannel
from specsplit.rpc.checksum import parse_checked, with_crc
from specsplit.rpc.credentials import ON_LOOPBACK
from specsplit.rpc.pb import common_pb2, target_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TARGET_SERVICE, TargetService
from specsplit.speculation.options import Speculation
from tests.support.damaging_proxy import DamagingProxy
from tests.support.fakes import FakeDraft, FakeTarget, FakeTokenizer, perfect_guess, plain_tokens
from tests.support.rpc_servers import LOOPBACK, verifier_at

PROMPT = tuple(b"Once upon a time")
COMMIT = calls.encode_commit(Verdict((1, 3), (1, 3, 7), 9, (1, 3)))


@pytest.mark.parametrize("mode", ["plain", "pingpong", "stream"])
async def test_flipped_bits_change_no_token(mode: str) -> None:
    speculation = Speculation(mode=mode, lookup=False)  # type: ignore[arg-type]
    policy = RetryPolicy(rng=random.Random(1))
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        proxy = DamagingProxy(int(server.address.rpartition(":")[2]), every=8, seed=1)
        async with proxy.running(), verifier_at(proxy.address, call_timeout_s=5.0) as verifier:
            draft = FakeDraft(perfect_guess)
            owner = Orchestrator(verifier, draft, FakeTokenizer(), speculation, retry_policy=policy)
            for seed in range(3):
                request = Request(prompt_ids=PROMPT, max_new_tokens=40, seed=seed, ignore_eos=True)
                expected = plain_tokens(SessionParams(seed=seed), PROMPT, 40)
                assert list((await owner.generate(request)).token_ids) == list(expected)
            await owner.aclose()
    assert proxy.num_damaged > 5


def flipped(data: bytes, at: int) -> bytes:
    """Return `data` with its bit number `at` flipped."""
    damaged = bytearray(data)
    damaged[at // 8] ^= 1 << at % 8
    return bytes(damaged)


def test_every_flipped_bit_of_a_message_is_found() -> None:
    data = with_crc(target_pb2.VerifyStreamResponse(commit=COMMIT.commit))
    found = 0
    for at in range(8 * len(data)):
        try:
            assert parse_checked(target_pb2.VerifyStreamResponse, flipped(data, at)).commit == COMMIT.commit
        except (WorkerFailed, InvalidRequest):
            found += 1
    assert found > 8 * (len(data) - 5)


def test_a_message_without_a_crc_is_not_checked() -> None:
    data = common_pb2.RoundCall(id=3, request=b"\x7d1234").SerializeToString()
    assert parse_checked(common_pb2.RoundCall, data).request == b"\x7d1234"
    # One of an earlier release is read by the later one and the other way about.
    assert common_pb2.RoundCall.FromString(with_crc(common_pb2.RoundCall(id=3))).id == 3
    assert with_crc(common_pb2.PingRequest()) == b"", "it has no such field"


async def test_an_answer_without_a_message_is_the_workers_failure() -> None:
    async def say_nothing(request: bytes, context: object) -> AsyncGenerator[bytes]:
        for nothing in ():
            yield nothing

    server = grpc.aio.server()
    handlers = {"Ping": grpc.unary_stream_rpc_method_handler(say_nothing)}  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TARGET_SERVICE, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port(LOOPBACK)}"
    await server.start()
    try:
        async with verifier_at(address) as verifier:
            with pytest.raises(WorkerFailed, match="no message"):
                await verifier.ping()
    finally:
        await server.stop(None)


async def test_ending_a_stream_that_the_link_has_lost_does_nothing() -> None:
    class LostCall:
        async def done_writing(self) -> None:
            await asyncio.sleep(0)
            raise grpc.aio.InternalError("Failed grpc_call_start_batch: 2")

    channel = WorkerChannel("127.0.0.1:50051", "The target", "target", ON_LOOPBACK)
    await Duplex(LostCall(), channel).end()
