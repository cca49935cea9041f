"""A worker as a service: who answers, who is refused and how, what health says."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specsplit.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvalidSettings,
    ModelDamaged,
    PeerMismatch,
    WorkerClosed,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.types import Budget, Identity, Proposal, Scores, Timings, TokenizerFiles, Turn, Verdict
from specsplit.limits import MAX_MESSAGE_BYTES
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.credentials import Security
from specsplit.rpc.server import ServerLimits, serving
from specsplit.rpc.servicers import DraftService, TargetService
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import decode_plainly, without_tree
from tests.support.fakes import FakeDraft, FakeTarget, Faults
from tests.support.language import scores_of
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import LOOPBACK, SERVING, drafter_at, health_of, verifier_at, wait_until

FILES = TokenizerFiles("abc123", (256,), {"tokenizer.json": bytes(range(256)) * 3000, "merges.txt": b""})


class Target(FakeTarget):
    """A target that scores and has a tokenizer, in as few words as a transport needs."""

    scored: object = None
    is_damaged = False

    async def score(self, prompt: Sequence[int], scored: Sequence[int], *others: Any) -> Scores:
        self.scored = (prompt, scored, *others)
        return scores_of([-0.5 * token_id for token_id in scored], Timings(3.0, 0.5, 2.0, 2, 700, 4, 720))

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        if self.is_damaged:
            raise ModelDamaged("fake has no tokenizer files.")
        return replace(FILES, files={}) if known_hash == FILES.hash else FILES


async def test_a_ping_tells_who_is_there_and_how_far():
    async with serving(LOOPBACK, [TargetService(Target())]) as server, verifier_at(server) as verifier:
        details = await verifier.ping_details()
    assert details.identity == await Target().ping()
    assert details.version
    assert details.round_trip_ms > 0
    assert abs(details.clock_skew_ms) < 1000


async def test_scores_and_biases_travel():
    target = Target()
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        scores = await verifier.score((1, 2), (3, 4), ((7, -1.5),), keep_for="anna")
    assert scores.log_probs == (-1.5, -2.0)
    sent, received = scores.timings.sent_bytes, scores.timings.received_bytes
    assert scores.timings == Timings(3.0, 0.5, 2.0, 2, 700, 4, 720, sent, received)
    assert min(sent, received) > 10
    assert target.scored == ((1, 2), (3, 4), ((7, -1.5),), 0, "anna")


async def test_a_tokenizer_arrives_whole_and_only_when_it_is_news():
    async with serving(LOOPBACK, [TargetService(Target())]) as server, verifier_at(server) as verifier:
        assert await verifier.tokenizer_files() == FILES
        assert await verifier.tokenizer_files("another") == FILES
        assert await verifier.tokenizer_files(FILES.hash) == replace(FILES, files={})


async def test_an_error_before_a_stream_begins_keeps_its_type():
    target = Target()
    target.is_damaged = True
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        with pytest.raises(ModelDamaged, match="no tokenizer files"):
            await verifier.tokenizer_files()
        assert server.num_running == 0


async def test_a_mistake_in_the_worker_is_told_without_its_inside(caplog: pytest.LogCaptureFixture):
    target = FakeTarget(Faults(fail_at=0, error=RuntimeError("tensor 7 of user 8")))
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        with pytest.raises(WorkerFailed) as raised:
            await verifier.verify(turn, without_tree(turn))
        assert "tensor" not in str(raised.value)
        assert "tensor 7 of user 8" in caplog.text
        assert len(await decode_plainly(verifier, PROMPT, 3)) == 3


async def test_a_session_is_said_to_be_lost_once_for_a_reason(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "specsplit.sessions")
    reasons = ["away", "away", "hangs", "away", "", "away"]

    class Lost(FakeTarget):
        async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
            if reason := reasons.pop(0):
                raise WorkerUnreachable(reason)
            return await super().verify(turn, proposal)

    async with serving(LOOPBACK, [TargetService(Lost())]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        while reasons:
            with suppress(WorkerUnreachable):
                await verifier.verify(turn, without_tree(turn))
        said = [message.rpartition(": ")[2] for message in caplog.messages if message.startswith("lost session")]
    assert said == ["away", "hangs", "away"], "and once again after it went on"


async def test_an_answer_that_no_message_can_carry_is_the_workers_failure():
    class Broken(FakeTarget):
        async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
            return Verdict((), (-1,), 6)

    async with serving(LOOPBACK, [TargetService(Broken())]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        with pytest.raises(WorkerFailed):
            await verifier.verify(turn, without_tree(turn))


async def test_timings_come_with_the_bytes_of_both_messages():
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        timings = (await verifier.verify(turn, without_tree(turn))).timings
    assert (timings.num_forwards, timings.device_ms) == (1, 1.0)
    assert 20 < timings.sent_bytes < 200
    assert 5 < timings.received_bytes < 100


async def test_the_wrong_role_is_said_by_both_names():
    async with (
        serving(LOOPBACK, [DraftService(FakeDraft())]) as draft,
        verifier_at(draft) as verifier,
        serving(LOOPBACK, [TargetService(FakeTarget())]) as target,
        drafter_at(target) as drafter,
    ):
        with pytest.raises(PeerMismatch, match=r"is a draft \(fake-FakeDraft\), but a target is needed"):
            await verifier.ping()
        with pytest.raises(PeerMismatch, match=r"is a target \(fake-FakeTarget\), but a draft is needed"):
            await drafter.ping()
        turn = Script().first()
        with pytest.raises(PeerMismatch, match="serves no such service: a worker of another role"):
            await verifier.verify(turn, without_tree(turn))


async def test_another_protocol_version_is_refused():
    class OldTarget(FakeTarget):
        async def ping(self) -> Identity:
            return replace(await super().ping(), protocol_version=7)

    async with serving(LOOPBACK, [TargetService(OldTarget())]) as server, verifier_at(server) as verifier:
        with pytest.raises(PeerMismatch, match="protocol version 7"):
            await verifier.ping()


async def test_what_is_no_worker_at_all_is_unreachable_or_a_mismatch():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    web = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with web, verifier_at(f"127.0.0.1:{web.sockets[0].getsockname()[1]}") as verifier:
        with pytest.raises((WorkerUnreachable, PeerMismatch, WorkerFailed), match=r"The target at 127\.0\.0\.1"):
            await verifier.ping()


async def test_an_address_that_refuses_is_unreachable_at_once():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        async with asyncio.timeout(LIMIT_S / 4), verifier_at(f"127.0.0.1:{reserved.getsockname()[1]}") as verifier:
            for _ in range(10):
                with pytest.raises(WorkerUnreachable, match="cannot be reached"):
                    await verifier.ping()
            await verifier.close("nobody")


async def test_a_worker_that_returns_is_reached_by_the_same_client():
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server, verifier_at(server) as verifier:
        address = server.address
        truth = await decode_plainly(verifier, PROMPT, 4)
        await server.drain(0)
        with pytest.raises(WorkerUnreachable):
            await verifier.ping()
        async with serving(address, [TargetService(FakeTarget())]), asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await verifier.ping()
                    break
                except WorkerUnreachable:
                    await asyncio.sleep(0.01)
            assert await decode_plainly(verifier, PROMPT, 4) == truth


async def test_a_port_in_use_is_refused_with_a_remedy():
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        with pytest.raises(InvalidSettings, match=rf"{server.address} is in use; .*another port"):
            async with serving(server.address, [DraftService(FakeDraft())]):
                pass
    async with serving(server.address, [DraftService(FakeDraft())]) as again:
        assert again.address == server.address


@pytest.mark.parametrize(
    ("listen", "error"),
    [
        ("127.0.0.1", InvalidRequest),
        ("nowhere", InvalidRequest),
        ("192.0.2.1:0", InvalidSettings),
        ("no-such-host.invalid:0", InvalidSettings),
    ],
)
async def test_an_address_where_nothing_can_listen_is_refused_by_name(listen: str, error: type[Exception]):
    with pytest.raises(error) as raised:
        async with serving(listen, [TargetService(FakeTarget())], security=Security(is_insecure=True)):
            pass
    assert listen in str(raised.value)


@pytest.mark.parametrize(("listen", "host"), [("0.0.0.0:0", "0.0.0.0"), ("localhost:0", "localhost")])
async def test_the_address_of_a_server_keeps_its_host_and_names_its_port(listen: str, host: str):
    async with serving(listen, [TargetService(FakeTarget())], security=Security(is_insecure=True)) as server:
        name, _, port = server.address.rpartition(":")
        assert (name, int(port) > 0) == (host, True)
        async with verifier_at(f"127.0.0.1:{port}") as verifier:
            assert (await verifier.ping()).role == "target"


async def test_a_message_over_the_limit_is_a_bad_request_either_way():
    class Talkative(Target):
        async def ping(self) -> Identity:
            return replace(await super().ping(), model="m" * MAX_MESSAGE_BYTES)

    async with serving(LOOPBACK, [TargetService(Talkative())]) as server, verifier_at(server) as verifier:
        turn = replace(Script().first(), tail=(1 << 31,) * (MAX_MESSAGE_BYTES // 5 + 1))
        with pytest.raises(InvalidRequest, match="too large"):
            await verifier.verify(turn, without_tree(turn))
        with pytest.raises(InvalidRequest, match="too large"):
            await verifier.ping()
        assert len(await decode_plainly(verifier, PROMPT, 2)) == 2
        async with grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/specsplit.v1.TargetService/VerifyDrafts")(bytes(MAX_MESSAGE_BYTES + 1))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_message_larger_than_grpcs_own_default_passes():
    async with serving(LOOPBACK, [TargetService(Target())]) as server, verifier_at(server) as verifier:
        scored = (1 << 31,) * (1 << 20)
        assert len((await verifier.score((1,), scored)).log_probs) == len(scored)


async def test_a_deadline_cancels_the_work_and_is_said():
    faults = Faults(gate=asyncio.Event())
    target = FakeTarget(faults)
    async with serving(LOOPBACK, [TargetService(target)]) as server:
        verifier = RemoteVerifier(server.address, call_timeout_s=0.2)
        turn = Script().first()
        with pytest.raises(DeadlineExceeded, match="no answer in time"):
            await verifier.verify(turn, without_tree(turn))
        await wait_until(lambda: target.num_under_way == 0 and server.num_running == 0)
        await verifier.aclose()
    assert target.slots == {}


async def test_a_server_ends_calls_that_set_no_deadline_of_their_own():
    target = FakeTarget(Faults(gate=asyncio.Event()))
    async with (
        serving(LOOPBACK, [TargetService(target)], ServerLimits(max_call_s=0.2)) as server,
        verifier_at(server) as verifier,
    ):
        turn = Script().first()
        with pytest.raises(DeadlineExceeded, match=r"longer than the 0\.2 s"):
            await verifier.verify(turn, without_tree(turn))
        await wait_until(lambda: target.num_under_way == 0)


async def test_cancelling_the_caller_cancels_the_work():
    target = FakeTarget(Faults(gate=asyncio.Event()))
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        call = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await wait_until(lambda: target.num_under_way == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await wait_until(lambda: target.num_under_way == 0)


async def test_a_client_closed_during_a_call_says_so_and_takes_no_more():
    target = FakeTarget(Faults(gate=asyncio.Event()))
    async with serving(LOOPBACK, [TargetService(target)]) as server, verifier_at(server) as verifier:
        turn = Script().first()
        call = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await wait_until(lambda: target.num_under_way == 1)
        await verifier.aclose()
        with pytest.raises(WorkerUnreachable, match="closed"):
            await call
        with pytest.raises(WorkerClosed):
            await verifier.ping()
        await verifier.aclose()


@pytest.mark.parametrize("role", ["DraftService", "TargetService"])
async def test_health_and_reflection_name_what_is_served(role: str):
    worker = DraftService(FakeDraft()) if role == "DraftService" else TargetService(FakeTarget())
    async with serving(LOOPBACK, [worker]) as server, grpc.aio.insecure_channel(server.address) as channel:
        for name in ("", "liveness", "readiness", f"specsplit.v1.{role}"):
            assert await health_of(channel, name) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health_of(channel, "specsplit.v1.StageService")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        listed = await reflected(channel, reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in listed.list_services_response.service}
        assert {f"specsplit.v1.{role}", "grpc.health.v1.Health"} <= names
        assert sum(name.startswith("specsplit") for name in names) == 1
        symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"specsplit.v1.{role}")
        assert (await reflected(channel, symbol)).file_descriptor_response.file_descriptor_proto


async def reflected(channel: grpc.aio.Channel, request: Any) -> Any:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(request)
    response = await call.read()
    await call.done_writing()
    return response


async def test_many_sessions_leave_no_task_behind():
    draft = FakeDraft()
    async with serving(LOOPBACK, [DraftService(draft)]) as server:
        idle = len(asyncio.all_tasks())
        drafter = RemoteDrafter(server.address)
        for _ in range(50):
            script = Script()
            await drafter.propose(script.first(), 0, Budget(4, 2, 2))
            await drafter.close(script.session)
        await drafter.aclose()
        await wait_until(lambda: server.num_running == 0)
        assert draft.slots == {}
        await wait_until(lambda: len(asyncio.all_tasks()) <= idle)
