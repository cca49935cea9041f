"""A large round has a stream of its own: none waits behind it, and its progress is heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import status_pb2

from specsplit.core.errors import WorkerUnreachable
from specsplit.core.progress import Progress, current_listener
from specsplit.core.types import Proposal, Turn, Verdict
from specsplit.limits import SMALL_BYTES
from specsplit.rpc import calls
from specsplit.rpc.pb import common_pb2, target_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeTarget
from tests.support.rounds_streams import ROUNDS, Gated, round_of, serving_rounds, told
from tests.support.rpc_servers import LOOPBACK, verifier_at, wait_until

CALL_TIMEOUT_S = 0.6


async def test_a_stream_takes_a_large_round_as_its_first_alone():
    async with (
        serving(LOOPBACK, [TargetService(FakeTarget())]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = channel.stream_stream(ROUNDS)()
        large = Script([5] * (SMALL_BYTES + 8192)).first([5] * (SMALL_BYTES + 8192))
        await call.write(round_of(1, Script().first()))
        await call.write(round_of(2, large))
        await call.write(round_of(3, Script().first()))
        answers = {answer.id: answer for answer in await told(call)}
        assert "open one for it" in status_pb2.Status.FromString(answers[2].status).message
        assert answers[1].response
        assert answers[3].response
        call = channel.stream_stream(ROUNDS)()
        await call.write(round_of(1, large))
        (answer,) = await told(call)
    assert "context" in status_pb2.Status.FromString(answer.status).message, "it reached the target"


async def test_a_large_request_has_a_stream_of_its_own():
    streams: list[list[int]] = []

    async def listen(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        streams.append(own := [])
        async for data in requests:
            call = common_pb2.RoundCall.FromString(data)
            request = calls.parse(target_pb2.VerifyDraftsRequest, call.request)
            own.append(length := len(request.turn.tail))
            verdict = calls.encode_verdict(Verdict((), (7,), length), Proposal(1, 0))
            yield common_pb2.RoundAnswer(id=call.id, response=verdict.SerializeToString()).SerializeToString()

    lengths = (6, SMALL_BYTES + 1, 7, SMALL_BYTES + 2, 8)
    async with serving_rounds(listen) as address, verifier_at(address) as verifier:
        for length in lengths:
            turn = Script([5] * length).first([5] * length)
            assert (await verifier.verify(turn, without_tree(turn))).length == length
    assert streams == [[6, 7, 8], [SMALL_BYTES + 1], [SMALL_BYTES + 2]]


class Patient(FakeTarget):
    """Takes longer than a client waits for a silent target, and says that it is at work."""

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        listener = current_listener()
        assert listener is not None
        for done in range(8):
            listener(Progress(done=done, total=8))
            await asyncio.sleep(CALL_TIMEOUT_S / 3)
        return await super().verify(turn, proposal)


@pytest.mark.parametrize("length", [6, 2 * SMALL_BYTES], ids=["small", "large"])
async def test_a_client_waits_for_a_target_that_tells_its_progress(length: int):
    async with serving(LOOPBACK, [TargetService(Patient(context=1 << 20))]) as server:
        async with verifier_at(server, call_timeout_s=CALL_TIMEOUT_S) as verifier:
            turn = Script([5] * length).first([5] * length)
            assert (await verifier.verify(turn, without_tree(turn))).length == length
        assert server.num_running == 0


async def test_the_end_of_a_large_rounds_stream_loses_no_client(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "specsplit.sessions")
    async with serving(LOOPBACK, [TargetService(FakeTarget(context=1 << 20))]) as server:
        async with verifier_at(server) as verifier:
            turn = Script([5] * 2 * SMALL_BYTES).first([5] * 2 * SMALL_BYTES)
            await verifier.verify(turn, without_tree(turn))
            await wait_until(lambda: not any("rounds" in task.get_name() for task in asyncio.all_tasks()))
            assert not caplog.messages
            turn = Script().first()
            await verifier.verify(turn, without_tree(turn))
        await wait_until(lambda: ["vanished" in message for message in caplog.messages] == [True])


def waiting_turn(target: Gated) -> Turn:
    """Return a large first turn for which the target waits until it is cancelled."""
    script = Script([5] * 2 * SMALL_BYTES)
    target.gates[script.session] = asyncio.Event()
    return script.first([5] * 2 * SMALL_BYTES)


async def test_a_large_round_that_is_broken_off_loses_its_client(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "specsplit.sessions")
    target = Gated()
    async with serving(LOOPBACK, [TargetService(target)]) as server:
        async with verifier_at(server) as verifier:
            turn = waiting_turn(target)
            waiting = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
            await wait_until(lambda: bool(target.waiting))
        with pytest.raises(WorkerUnreachable):
            await waiting
        await wait_until(lambda: ["vanished" in message for message in caplog.messages] == [True])


async def test_closing_a_client_ends_its_large_round():
    target = Gated()
    async with serving(LOOPBACK, [TargetService(target)]) as server:
        async with verifier_at(server) as verifier:
            turn = waiting_turn(target)
            waiting = [asyncio.create_task(verifier.verify(turn, without_tree(turn))) for _ in range(2)]
            await wait_until(lambda: len(target.waiting) == 2)
            waiting[0].cancel()
            await wait_until(lambda: len(target.waiting) == 1)
        with pytest.raises(WorkerUnreachable):
            await waiting[1]
        await wait_until(lambda: not target.waiting)
