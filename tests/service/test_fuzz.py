"""Sessions, streams and chains that break every rule, on live workers: no status of a defect, no death, no wrong text.

`make fuzz` sends 20,000 messages a method.
"""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from specsplit.core.types import Budget, SessionParams
from specsplit.draft.engine import DraftEngine
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.stages.codec import decode
from specsplit.stages.packet import HeadRequest, Packet, PacketSession, PayloadType, StepKind
from specsplit.stages.wire.frames import ChainId, FrameReader, packet_frames
from specsplit.stages.wire.peer import StagePeer
from specsplit.target.engine import TargetEngine
from tests.contract.session_contract import Script
from tests.support.hash_model import hash_model, plain_tokens
from tests.support.remote_chains import served
from tests.support.rounds import plain_text
from tests.support.rpc_servers import LOOPBACK, drafter_at, verifier_at
from tests.support.small_target import shards
from tests.support.state_fuzz import Fuzzer, storm

IS_ALL = os.environ.get("SPECSPLIT_TEST_ALL") == "1"
NUM_MESSAGES = int(os.environ.get("SPECSPLIT_TEST_NUM_MESSAGES") or (2_000 if IS_ALL else 60))
"""Messages of each method."""
MAX_GROWTH_MIB = 200
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BUDGET = Budget(4, 2)
PARAMS = SessionParams(prompt_length=len(PROMPT), max_tokens=64)
_ASKED = PacketSession(0, 1, 0, hashes=(1, 2, 3), token_ids=(5, 6, 7), num_logits=1, head_request=HeadRequest(PARAMS))
PACKET = Packet(1, StepKind.PREFILL, 32, PayloadType.FP32, -1, 0, (_ASKED,))


def resident_mib() -> int:
    """Return the memory of this process, in which client and workers live."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") >> 20


def _is_of_an_ended_loop(record: logging.LogRecord) -> bool:
    """Whether gRPC's poller, which all loops of a process share, had an event for the loop of an earlier test."""
    error = record.exc_info[1] if record.exc_info else None
    return "_handle_events" in record.getMessage() and str(error) == "Event loop is closed"


def check(fuzzer: Fuzzer, before_mib: int, caplog: pytest.LogCaptureFixture) -> None:
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    defects = [record.getMessage() for record in errors if not _is_of_an_ended_loop(record)]
    assert not defects, defects
    assert min(fuzzer.sent[method] for method in fuzzer.episodes) >= NUM_MESSAGES, fuzzer.sent
    assert fuzzer.codes[grpc.StatusCode.OK] > 0
    assert fuzzer.codes[grpc.StatusCode.INVALID_ARGUMENT] > 0
    codes = {code.name: count for code, count in fuzzer.codes.most_common()}
    logging.getLogger(__name__).info("%s, %s, %d MiB more", dict(fuzzer.sent), codes, resident_mib() - before_mib)
    assert resident_mib() - before_mib < MAX_GROWTH_MIB


async def test_a_target_and_a_draft_keep_their_word_whatever_comes(caplog: pytest.LogCaptureFixture) -> None:
    truth = plain_tokens(PARAMS, PROMPT, 16)
    draft, target = (
        DraftEngine(hash_model("draft", max_sessions=6)[0], grace_s=0.0),
        TargetEngine(hash_model("target", max_sessions=6)[0], grace_s=0.0),
    )
    services = (
        DraftService(draft, lambda: draft.num_sessions, draft),
        TargetService(target, lambda: target.num_sessions, target),
    )
    async with (
        serving(LOOPBACK, services) as server,
        verifier_at(server) as verifier,
        drafter_at(server) as drafter,
        grpc.aio.insecure_channel(server.address) as channel,
    ):

        async def canary() -> None:
            assert await plain_text(verifier, PROMPT, PARAMS, 16) == truth
            turn = Script(PROMPT).first()
            assert len(await drafter.propose(turn, 0, BUDGET)) > 0
            await drafter.close(turn.session)

        await canary()
        fuzzers = [Fuzzer(role, channel, random.Random(f"{role} 1")) for role in ("target", "draft")]
        before_mib = resident_mib()
        await storm(fuzzers, NUM_MESSAGES, canary)
        for fuzzer in fuzzers:
            check(fuzzer, before_mib, caplog)
        await canary()
        assert server.num_running == 0
    for engine in (draft, target):
        await engine.sweep()
        engine.check_integrity()
        await engine.aclose()


async def test_a_stage_keeps_its_word_whatever_comes(caplog: pytest.LogCaptureFixture) -> None:
    async with served(shards(bounds=()).stages) as (host,), grpc.aio.insecure_channel(host.address) as channel:
        number = 0

        async def picks() -> tuple[int, ...]:
            nonlocal number
            number += 1
            peer, chain = StagePeer(host.address), ChainId(f"canary {number}", 1)
            await peer.configure(chain, 0, 1, "", keep_slots=False, takeover=True)
            stream = await peer.stream(chain)
            await stream.write(next(packet_frames(PACKET)))
            data = await stream.read()
            assert data is not None
            answered = FrameReader("the stage").read(data)
            assert answered is not None
            assert not isinstance(answered, Message), answered
            stream.cancel()
            await peer.aclose()
            return tuple(decode(answered).sessions[0].picks)

        truth = await picks()

        async def canary() -> None:
            assert await picks() == truth

        fuzzer, before_mib = Fuzzer("stage", channel, random.Random("stage 1")), resident_mib()
        await storm([fuzzer], NUM_MESSAGES, canary)
        check(fuzzer, before_mib, caplog)
