"""The stream that carries the rounds of all sessions: none waits for another, and what breaks it ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from specsplit.core.errors import (
    LinkError,
    NoFreeSlot,
    Overloaded,
    SlotBehind,
    WorkerClosed,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.progress import Progress, current_listener
from specsplit.core.types import Verdict
from specsplit.rpc import rounds
from specsplit.rpc.pb import common_pb2, target_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.rpc.status import of_call, status_of
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import decode_plainly, without_tree
from tests.support.fakes import FakeTarget, Faults
from tests.support.processes import LIMIT_S
from tests.support.rounds_streams import ROUNDS, Gated, round_of, serving_rounds, told
from tests.support.rpc_servers import LOOPBACK, CountingProxy, duplex_status, verifier_at, wait_until

VERIFY = "/specsplit.v1.TargetService/VerifyDrafts"
BAD = grpc.StatusCode.INVALID_ARGUMENT


async def test_a_round_does_not_wait_for_that_of_another_session():
    target = Gated()
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        slow, quick = Script(), Script()
        gate = target.gates[slow.session] = asyncio.Event()
        first = slow.first()
        held_up = asyncio.create_task(verifier.verify(first, without_tree(first)))
        await wait_until(lambda: target.waiting == [slow.session])
        assert len(await decode_plainly(verifier, PROMPT, 5)) == 5
        turn = quick.first()
        assert len((await verifier.verify(turn, without_tree(turn))).token_ids) == 1
        assert not held_up.done()
        gate.set()
        assert len((await held_up).token_ids) == 1


async def test_a_withdrawn_round_ends_and_the_stream_goes_on():
    target = Gated()
    async with serving(LOOPBACK, [TargetService(target)]) as server:
        proxy = CountingProxy(int(server.address.rpartition(":")[2]))
        async with proxy.running(), verifier_at(proxy.address) as verifier:
            script = Script()
            gate = target.gates[script.session] = asyncio.Event()
            first = script.first()
            withdrawn = asyncio.create_task(verifier.verify(first, without_tree(first)))
            await wait_until(lambda: target.waiting == [script.session])
            withdrawn.cancel()
            await wait_until(lambda: not target.waiting)
            gate.set()
            assert (await verifier.verify(first, without_tree(first))).token_ids  # the same round, again
            assert proxy.num_connections == 1


async def test_errors_of_rounds_come_back_typed_and_touch_no_other():
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server, verifier_at(server) as verifier:
        ahead = Script().turn(PROMPT, 3)
        good = [Script().first() for _ in range(20)]
        answers = await asyncio.gather(
            *(verifier.verify(turn, without_tree(turn)) for turn in [*good[:10], ahead, *good[10:]]),
            return_exceptions=True,
        )
    assert isinstance(answers[10], SlotBehind)
    assert answers[10].have == 0
    assert all(isinstance(answer, Verdict) for answer in answers[:10] + answers[11:])


async def test_a_broken_stream_fails_its_rounds_and_the_next_opens_another():
    target = Gated()
    async with serving(LOOPBACK, [TargetService(target)]) as server:
        proxy = CountingProxy(int(server.address.rpartition(":")[2]))
        scripts = [Script() for _ in range(3)]
        for script in scripts:
            target.gates[script.session] = asyncio.Event()
        async with proxy.running(), verifier_at(proxy.address) as verifier:
            turns = [script.first() for script in scripts]
            running = [asyncio.create_task(verifier.verify(turn, without_tree(turn))) for turn in turns]
            await wait_until(lambda: len(target.waiting) == 3)
            proxy.cut()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(outcome, WorkerUnreachable) for outcome in outcomes)
            await wait_until(lambda: not target.waiting)  # nobody computes for a client that has gone
            assert len(await decode_plainly(verifier, PROMPT, 3)) == 3
            assert proxy.num_connections == 2


@pytest.mark.parametrize(
    "messages",
    [
        [b"\xff\xfe\xfd"],
        [round_of(0, Script().first())],
        [round_of(1, Script().first()), round_of(1, Script().first())],
        [round_of(7, Script().first()), round_of(6, Script().first())],
        [round_of(1)],
        [round_of(1, withdraws=True)],
    ],
    ids=["at random", "without an id", "an id again", "an id that falls", "without a body", "withdraws nothing"],
)
async def test_a_message_that_makes_no_sense_ends_its_stream_and_no_other(messages: Sequence[bytes]):
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server, verifier_at(server) as verifier:
        assert len(await decode_plainly(verifier, PROMPT, 2)) == 2
        async with grpc.aio.insecure_channel(server.address) as channel:
            assert await duplex_status(channel.stream_stream(ROUNDS), *messages) is BAD
        assert len(await decode_plainly(verifier, PROMPT, 2)) == 2
        await wait_until(lambda: server.num_running == 0)


async def test_a_request_that_makes_no_sense_is_answered_and_the_stream_goes_on():
    async with (
        serving(LOOPBACK, [TargetService(FakeTarget())]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = channel.stream_stream(ROUNDS)()
        await call.write(common_pb2.RoundCall(id=1, request=b"\xff\xff").SerializeToString())
        await call.write(round_of(2, Script().first()))
        answers = {answer.id: answer for answer in await told(call)}
    assert status_pb2.Status.FromString(answers[1].status).code == BAD.value[0]
    assert len(target_pb2.VerifyDraftsResponse.FromString(answers[2].response).token_ids) == 1


async def test_a_client_that_ends_its_messages_gets_what_it_asked_for():
    async with (
        serving(LOOPBACK, [TargetService(FakeTarget(Faults(pauses=50)))]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = channel.stream_stream(ROUNDS)()
        for number in range(1, 6):
            await call.write(round_of(number, Script().first()))
        await call.write(round_of(3, withdraws=True))
        answers = await told(call)
    assert {answer.id for answer in answers} | {3} == {1, 2, 3, 4, 5}


async def test_too_many_rounds_are_refused_and_withdrawn_ones_make_room(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rounds, "MAX_ROUNDS", 3)
    target = FakeTarget(Faults(gate=asyncio.Event()))
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        turns = [Script().first() for _ in range(3)]
        running = [asyncio.create_task(verifier.verify(turn, without_tree(turn))) for turn in turns]
        await wait_until(lambda: target.num_under_way == 3)
        turn = Script().first()
        with pytest.raises(NoFreeSlot):
            await verifier.verify(turn, without_tree(turn))
        running.pop().cancel()
        await wait_until(lambda: target.num_under_way == 2)
        running.append(asyncio.create_task(verifier.verify(turn, without_tree(turn))))
        await wait_until(lambda: target.num_under_way == 3)
        assert target.faults.gate is not None
        target.faults.gate.set()
        assert len(await asyncio.gather(*running)) == 3


async def test_progress_that_a_client_does_not_read_takes_no_rounds_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rounds, "MAX_ROUNDS", 3)
    unread, refused = asyncio.Event(), list[int]()
    messages = asyncio.Queue[bytes | None]()

    async def write(data: bytes) -> None:
        await unread.wait()
        answer = common_pb2.RoundAnswer.FromString(data)
        if answer.WhichOneof("body") == "status":
            refused.append(answer.id)

    num_begun = 0

    async def serve(request: bytes, trace: object) -> bytes:
        nonlocal num_begun
        num_begun += 1
        listener = current_listener()
        assert listener is not None
        listener(Progress(done=0, total=1))
        await unread.wait()
        return b"answer"

    served = asyncio.create_task(rounds.ServedRounds(messages.get, write, serve).run(asyncio.Event()))
    for number in range(1, 101):
        messages.put_nowait(round_of(number, Script().first()))
    for _ in range(1000):
        await asyncio.sleep(0)
    assert num_begun == 3
    assert messages.qsize() > 80, "a client that reads nothing is not read either"
    unread.set()
    messages.put_nowait(None)
    async with asyncio.timeout(LIMIT_S):
        await served
    assert min(refused) == 4


async def test_what_ends_the_stream_is_no_ones_own_mistake():
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        for _ in range(3):
            await anext(requests)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "a message was too large")
        yield b""

    async with serving_rounds(refuse) as address, verifier_at(address) as verifier:
        turns = [Script().first() for _ in range(3)]
        failures = await asyncio.gather(
            *(verifier.verify(turn, without_tree(turn)) for turn in turns), return_exceptions=True
        )
    assert all(isinstance(failure, WorkerFailed) for failure in failures)
    assert len({id(failure) for failure in failures}) == 3


async def test_a_full_worker_tells_every_round_of_a_stream_when_to_come_back():
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        for _ in range(3):
            await anext(requests)
        await context.abort_with_status(of_call(status_of(Overloaded("The worker is full.", 0.25, "sessions"))))
        yield b""

    async with serving_rounds(refuse) as address, verifier_at(address) as verifier:
        turns = [Script().first() for _ in range(3)]
        failures = await asyncio.gather(
            *(verifier.verify(turn, without_tree(turn)) for turn in turns), return_exceptions=True
        )
    said = [(str(error), error.retry_after_s, error.limit) for error in failures if isinstance(error, Overloaded)]
    assert said == [("The worker is full.", 0.25, "sessions")] * 3
    assert len({id(failure) for failure in failures}) == 3


async def test_rounds_that_are_given_up_before_they_leave_are_never_sent():
    received: list[common_pb2.RoundCall] = []
    reads = asyncio.Event()

    async def listen(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        await reads.wait()
        async for data in requests:
            received.append(common_pb2.RoundCall.FromString(data))
            yield common_pb2.RoundAnswer(id=received[-1].id, response=b"no verdict").SerializeToString()

    async with serving_rounds(listen) as address, verifier_at(address) as verifier:
        tail = (5,) * 30_000  # a few of these fill what the peer has room for
        turns = [Script(tail).first(tail) for _ in range(200)]
        running = [asyncio.create_task(verifier.verify(turn, without_tree(turn))) for turn in turns]
        await asyncio.sleep(0.2)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        reads.set()
        last = Script().first()
        with pytest.raises(WorkerFailed):
            await verifier.verify(last, without_tree(last))
    requests = [call.id for call in received if call.WhichOneof("body") == "request"]
    withdrawn = [call.id for call in received if call.WhichOneof("body") == "withdraw"]
    assert requests[-1] == 201
    assert len(requests) < 150
    assert withdrawn == requests[:-1]


async def test_streams_that_break_leave_no_task_behind():
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        proxy = CountingProxy(int(server.address.rpartition(":")[2]))
        async with proxy.running(), verifier_at(proxy.address) as verifier:
            for _ in range(5):
                turn = Script().first()
                while True:
                    try:
                        await verifier.verify(turn, without_tree(turn))
                        break
                    except WorkerUnreachable:
                        await asyncio.sleep(0.01)
                proxy.cut()
                await wait_until(lambda: not any("rounds" in task.get_name() for task in asyncio.all_tasks()))


async def test_a_closing_client_takes_no_round_and_closes_though_cancelled():
    stopped = asyncio.Event()

    async def hang(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        await stopped.wait()
        yield b""

    async with serving_rounds(hang) as address, verifier_at(address) as verifier:
        turn = Script().first()
        running = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(verifier.aclose())
        with pytest.raises(WorkerUnreachable, match="closed during"):
            await running
        with pytest.raises(WorkerClosed):
            await verifier.verify(turn, without_tree(turn))
        closing.cancel()
        await asyncio.wait({closing})
        assert not any("rounds" in task.get_name() for task in asyncio.all_tasks())
        with pytest.raises(WorkerClosed):
            await verifier.ping()
        stopped.set()


async def test_a_drain_ends_idle_streams_and_answers_what_is_in_hand():
    target = FakeTarget(Faults(gate=asyncio.Event()))
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        running = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await wait_until(lambda: target.num_under_way == 1)
        drain = asyncio.create_task(server.drain(2 * LIMIT_S))
        await asyncio.sleep(0.02)
        assert target.faults.gate is not None
        target.faults.gate.set()
        assert len((await running).token_ids) == 1
        async with asyncio.timeout(LIMIT_S):
            await drain
        with pytest.raises(LinkError):
            await verifier.verify(turn, without_tree(turn))


@pytest.mark.parametrize(
    "answer",
    [b"\xff\xff", common_pb2.RoundAnswer(id=1).SerializeToString()],
    ids=["at random", "without a body"],
)
async def test_an_answer_that_makes_no_sense_is_the_workers_failure(answer: bytes):
    num_open = 0

    async def garble(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        nonlocal num_open
        num_open += 1
        try:
            async for _ in requests:
                yield common_pb2.RoundAnswer(id=99, response=b"of a call that nobody made").SerializeToString()
                yield answer
        finally:
            num_open -= 1

    async with serving_rounds(garble) as address, verifier_at(address) as verifier:
        for _ in range(3):
            turn = Script().first()
            with pytest.raises(WorkerFailed):
                await verifier.verify(turn, without_tree(turn))
            if answer != b"\xff\xff":
                break  # the ids of a stream rise
        await wait_until(lambda: answer != b"\xff\xff" or num_open == 0)
