"""Sessions and chains belong to who opened them: no method lets another identity of the same role use or end one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from specsplit.core.types import Budget, Proposal, StreamLimits
from specsplit.rpc import calls
from specsplit.rpc.auth import LinkRole
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.pb import common_pb2, stage_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.stages.wire.frames import ChainId
from specsplit.stages.wire.peer import StagePeer
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.service.test_mtls import channel_to
from tests.support.certificates import Authority
from tests.support.fakes import FakeDraft, FakeTarget
from tests.support.processes import LIMIT_S
from tests.support.remote_chains import served
from tests.support.reuse import HOT, Served, new_key
from tests.support.rounds import params_of, random_prompt, script
from tests.support.rpc_servers import LOOPBACK, duplex_status
from tests.support.small_target import shards

DENIED = grpc.StatusCode.PERMISSION_DENIED
SECRET = b"a secret of the test"


async def status_of(
    channel: grpc.aio.Channel, path: str, request: bytes, arity: str = "unary_unary"
) -> grpc.StatusCode:
    """Return how a call ends; of a stream of rounds, how its round does."""
    if path.endswith("/Rounds"):
        stream: Any = channel.stream_stream(path)()
        await stream.write(common_pb2.RoundCall(id=1, request=request).SerializeToString())
        answer = common_pb2.RoundAnswer.FromString(await stream.read())
        stream.cancel()
        code = status_pb2.Status.FromString(answer.status).code
        return next(each for each in grpc.StatusCode if each.value[0] == code)
    method = getattr(channel, arity)(path)
    if arity == "stream_stream":
        return await duplex_status(method, request)
    try:
        call = method(request, timeout=LIMIT_S)
        await (call if arity == "unary_unary" else call.read())
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_no_method_lets_another_use_or_end_a_session_of_a_target(tmp_path: Path) -> None:
    authority, turn, target = Authority(tmp_path), Script().first(), FakeTarget()
    security = authority.role("target").security("target")
    async with serving(LOOPBACK, [TargetService(target)], security=security) as server:
        alice = RemoteVerifier(server.address, security=authority.role("gateway", "alice").security("gateway"))
        await alice.verify(turn, without_tree(turn))
        verify = calls.encode_verify_request(turn, without_tree(turn)).SerializeToString()
        stream = calls.encode_open(turn, StreamLimits(4, 2, 2)).SerializeToString()
        async with channel_to(server, "target", authority.role("gateway", "bob"), authority.ca) as bob:
            service = "/specsplit.v1.TargetService/"
            assert await status_of(bob, service + "VerifyDrafts", verify) is DENIED
            assert await status_of(bob, service + "Rounds", verify) is DENIED
            assert await status_of(bob, service + "VerifyStream", stream, "stream_stream") is DENIED
            end = calls.encode_end_session(turn.session).SerializeToString()
            assert await status_of(bob, service + "EndSession", end) is DENIED
        assert turn.session in target.slots
        await alice.aclose()


async def test_rows_of_a_score_are_for_the_same_identity(tmp_path: Path) -> None:
    authority, prompt = Authority(tmp_path), random_prompt(50)
    security = authority.role("target").security("target")
    async with Served() as target, serving(LOOPBACK, [TargetService(target)], security=security) as server:
        alice, bob = (
            RemoteVerifier(server.address, security=authority.role("gateway", name).security("gateway"))
            for name in ("alice", "bob")
        )
        await alice.score(prompt[:1], prompt[1:], keep_for="")
        num_reused = list[int]()
        for client, caller in ((bob, ""), (bob, "carol"), (alice, "")):
            turn = script(replace(params_of(HOT, 50), caller=caller), prompt, 0, 1, new_key())
            num_reused.append((await client.verify(turn, Proposal(1, 49))).num_reused)
            await client.close(turn.session)
        assert num_reused == [0, 0, 49]
        scores = [await client.score([9, *prompt], [1], keep_for="") for client in (alice, bob, alice)]
        assert [found.timings.num_tokens for found in scores] == [51, 51, 1]
        await alice.aclose()
        await bob.aclose()


async def test_no_method_lets_another_use_or_end_a_session_of_a_draft(tmp_path: Path) -> None:
    authority, turn, draft = Authority(tmp_path), Script().first(), FakeDraft()
    security = authority.role("draft").security("draft")
    async with serving(LOOPBACK, [DraftService(draft)], security=security) as server:
        alice = RemoteDrafter(server.address, security=authority.role("gateway", "alice").security("gateway"))
        await alice.propose(turn, 0, Budget(4, 2, 2))
        propose = calls.encode_drafts_request(turn, 0, Budget(4, 2, 2)).SerializeToString()
        async with channel_to(server, "draft", authority.role("gateway", "bob"), authority.ca) as bob:
            service = "/specsplit.v1.DraftService/"
            assert await status_of(bob, service + "GenerateDrafts", propose) is DENIED
            assert await status_of(bob, service + "Rounds", propose) is DENIED
            end = calls.encode_end_session(turn.session).SerializeToString()
            assert await status_of(bob, service + "EndSession", end) is DENIED
        assert turn.session in draft.slots
        await alice.aclose()


@pytest.mark.parametrize("other", ["target", "stage"])
async def test_no_method_lets_another_use_or_end_a_chain_of_a_target(other: LinkRole, tmp_path: Path) -> None:
    """Who knows the name of the chain, and not the secret, is a stranger, whatever certificate it has."""
    authority = Authority(tmp_path)
    chain = ChainId("me", 1, SECRET)
    named = stage_pb2.ChainId(coordinator="me", number=1)
    async with served([shards(bounds=()).stages[0]], security=authority.role("stage").security("stage")) as (host,):
        alice = StagePeer(host.address, authority.role("target", "alice").security("target"))
        await alice.configure(chain, 0, 1, "", keep_slots=False)
        opened = await alice.stream(chain)
        async with channel_to(host.server, "stage", authority.role(other, "bob"), authority.ca) as bob:
            service = "/specsplit.v1.StageService/"
            end = stage_pb2.EndSlotRequest(chain=named, slot=0).SerializeToString()
            assert await status_of(bob, service + "EndSession", end) is DENIED
            export = stage_pb2.ExportKVRequest(chain=named, slot=0).SerializeToString()
            assert await status_of(bob, service + "ExportKV", export, "unary_stream") is DENIED
            piece = stage_pb2.SlotPiece(chain=named, data=b"SSKV").SerializeToString()
            assert await status_of(bob, service + "ImportKV", piece, "stream_stream") is DENIED
            hello = stage_pb2.Hello(chain=named, role=stage_pb2.STREAM_ROLE_COORDINATOR)
            first = stage_pb2.Frame(hello=hello).SerializeToString()
            assert await status_of(bob, service + "Forward", first, "stream_stream") is DENIED
            for secret in (b"", b"guessed"):
                taken = stage_pb2.ConfigureRequest(chain=named, num_stages=1, takeover=True, secret=secret)
                code = await status_of(bob, service + "Configure", taken.SerializeToString())
                assert code is (DENIED if other == "stage" else grpc.StatusCode.FAILED_PRECONDITION)
        assert host.service.num_sessions == 1, "the coordinator's stream is still open"
        opened.cancel()
        await alice.aclose()
