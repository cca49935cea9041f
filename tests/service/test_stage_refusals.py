"""What a stage and a coordinator refuse, and why; the stage lives on and serves whoever behaves."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import (
    CorruptPacket,
    InvalidPacket,
    InvalidRequest,
    PeerMismatch,
    SpecSplitError,
    StaleEpoch,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.engine.executor import MAX_FAILED_STEPS
from specsplit.rpc.channel import Duplex, WorkerChannel
from specsplit.rpc.credentials import ON_LOOPBACK
from specsplit.rpc.pb import stage_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.stages.codec import decode, encode
from specsplit.stages.packet import HeadRequest, Packet, PacketSession, PayloadType, StepKind
from specsplit.stages.shard.loader import LoadedShard, ShardOptions, ShardSpec, load_shard
from specsplit.stages.shard.payload import to_payload
from specsplit.stages.slot_state import SlotState, encode_state
from specsplit.stages.wire.frames import ChainId, FrameReader, error_in, packet_frames
from specsplit.stages.wire.messages import slot_pieces
from specsplit.stages.wire.peer import StagePeer
from specsplit.stages.wire.remote_chain import RemoteChain
from tests.support.fakes import FakeTarget
from tests.support.processes import LIMIT_S
from tests.support.remote_chains import StageHost, expected_of, opened_remote, served
from tests.support.rounds import plain_text
from tests.support.rpc_servers import LOOPBACK, wait_until
from tests.support.small_target import folder, shards

PARAMS = SessionParams(SamplingParams(), prompt_length=5, max_tokens=64)
CHAIN = ChainId("me", 1)


@cache
def other_shard(start: int, end: int, seed: int = 1, **options: Any) -> LoadedShard:
    spec = ShardSpec(start, end, start == 0, end == 3)
    options = {"max_sessions": 4, "threads": 1, "context": 160, "record": False, **options}
    return load_shard(str(folder(seed)), spec, ShardOptions(**options))


async def refusal(stages: Sequence[LoadedShard], spares: Sequence[LoadedShard] = ()) -> tuple[str, list[str]]:
    """Return why a coordinator refuses stages, and where they are."""
    async with served([*stages, *spares]) as hosts:
        addresses = [host.address for host in hosts]
        wanted = expected_of(shards(), folder())
        chain = RemoteChain(addresses[: len(stages)], addresses[len(stages) :], wanted)
        try:
            with pytest.raises(PeerMismatch) as refused:
                await chain.connect()
        finally:
            await chain.aclose()
        assert all(host.server.num_running == 0 for host in hosts)
        return str(refused.value), addresses


async def test_a_chain_with_an_unfit_stage_is_refused_with_the_reason() -> None:
    first, second, third = shards().stages
    reason, addresses = await refusal([first, other_shard(1, 2, seed=2), third])
    assert f"The stage at {addresses[1]} has other weights for layers 1:2" in reason
    reason, addresses = await refusal([first, third, second])
    assert "Layers 1:2 are missing" in reason
    reason, addresses = await refusal([second, first, third])
    assert f"The first stage, at {addresses[0]}, has layers 1:2" in reason
    reason, addresses = await refusal([first, other_shard(0, 2), third])
    assert "overlap" in reason
    reason, addresses = await refusal([first, second])
    assert "Layers 2:3 are missing behind" in reason
    reason, addresses = await refusal([first, other_shard(1, 2, dtype="bf16"), third])
    assert f"The stage at {addresses[1]} computes in bf16" in reason
    reason, addresses = await refusal([*shards("coordinator").stages])
    assert f"The stage at {addresses[0]} has layers 0:1 without the embedding" in reason


async def test_a_spare_that_does_not_fit_is_refused_with_the_reason() -> None:
    reason, addresses = await refusal(shards().stages, [other_shard(1, 2, context=80)])
    assert f"The stage at {addresses[3]} has a context of 80 tokens" in reason
    reason, addresses = await refusal(shards().stages, [other_shard(0, 2)])
    assert reason == f"The spare at {addresses[3]} has layers 0:2, which no stage here has."


async def test_what_is_no_stage_and_what_is_not_there_is_named() -> None:
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as target:
        for address, error, sentence in (
            (target.address, PeerMismatch, f"At {target.address} is no stage"),
            ("127.0.0.1:1", WorkerUnreachable, "The stage at 127.0.0.1:1 cannot be reached"),
        ):
            chain = RemoteChain([address], [], expected_of(shards()))
            with pytest.raises(error, match=sentence):
                await chain.connect()
            await chain.aclose()
    with pytest.raises(InvalidRequest, match="named twice"):
        RemoteChain(["a:1"], ["a:1"], expected_of(shards()))


async def test_a_restarted_stage_with_other_weights_does_not_get_its_place_back() -> None:
    async with opened_remote(shards()) as chain:
        await plain_text(chain.target, [5, 6, 7], PARAMS, 1)
        host = chain.hosts[1]
        host.shard = other_shard(0, 2)
        await host.restart()
        await wait_until(lambda: chain.link.trouble is not None)
        with pytest.raises(PeerMismatch, match=host.address):
            await plain_text(chain.target, [5, 6, 7], PARAMS, 1)


async def test_a_second_coordinator_is_refused() -> None:
    async with opened_remote(shards()) as first:
        text = await plain_text(first.target, [5, 6, 7, 8, 9], PARAMS, 3)
        addresses = first.link.addresses
        second = RemoteChain(addresses, [], expected_of(shards()))
        with pytest.raises(PeerMismatch, match=rf"The stage at {addresses[0]} refuses: .*another coordinator"):
            await second.connect()
        await second.aclose()
        assert await plain_text(first.target, [5, 6, 7, 8, 9], PARAMS, 3) == text, "the first one notices nothing"
        assert first.link.statistics.num_reconnects == 0


@asynccontextmanager
async def alone(shard: LoadedShard, at_once_s: float = 0.0) -> AsyncIterator[tuple[StageHost, StagePeer]]:
    """Serve one stage, configured as a chain of its own."""
    async with served([shard], at_once_s) as hosts:
        peer = StagePeer(hosts[0].address)
        await peer.configure(CHAIN, 0, 1, "", keep_slots=False)
        try:
            yield hosts[0], peer
        finally:
            await peer.aclose()


def packet(request_id: int) -> Packet:
    request = HeadRequest(PARAMS)
    session = PacketSession(0, request_id, 0, hashes=(1, 2, 3), token_ids=(5, 6, 7), num_logits=1, head_request=request)
    return Packet(request_id, StepKind.PREFILL, 32, PayloadType.FP32, -1, 0, (session,))


async def answer(stream: Duplex) -> Packet | SpecSplitError:
    data = await stream.read()
    assert data is not None
    frame = FrameReader("a link").read(data)
    if isinstance(frame, stage_pb2.Frame):
        return error_in(frame.error, "The stage")
    assert frame is not None
    return decode(frame)


async def send(stream: Duplex, data: bytes) -> Packet | SpecSplitError:
    await stream.write(data)
    return await answer(stream)


def framed(data: bytes) -> bytes:
    return stage_pb2.Frame(packet=data).SerializeToString()


def lying(data: bytes, at: int, value: int) -> bytes:
    """Return the packet with one byte of its header changed and the crc made right again."""
    lied, header = bytearray(data), struct.calcsize("<4sHQIQBIIIBBIhhIQ")
    lied[at] = value
    struct.pack_into("<I", lied, header, zlib.crc32(lied[header + 4 :], zlib.crc32(lied[:header])))
    return bytes(lied)


async def test_malformed_damaged_and_lying_packets_harm_no_stage() -> None:
    async with alone(shards(bounds=()).stages[0]) as (_, peer):
        stream = await peer.stream(CHAIN)
        good = b"".join(encode(packet(1)))
        assert isinstance(await send(stream, framed(good)), Packet)
        damaged = bytearray(good)
        damaged[80] ^= 1
        for data, error in (
            (b"\xff" * 40, CorruptPacket),
            (framed(b""), CorruptPacket),
            (framed(good[:-1]), CorruptPacket),
            (framed(bytes(damaged)), CorruptPacket),
            (framed(lying(good, 4, 9)), InvalidPacket),  # the version
            (framed(lying(good, 35, 9)), InvalidPacket),  # the hidden size
            (stage_pb2.Frame(draining=True).SerializeToString(), InvalidPacket),
            (next(packet_frames(replace(packet(2), stage_from=4, stage_to=5))), InvalidPacket),
        ):
            assert type(await send(stream, data)) is error, data
        after = await send(stream, next(packet_frames(packet(3))))
        assert isinstance(after, Packet)
        assert len(after.sessions[0].picks) == 1
        stream.cancel()


@pytest.mark.parametrize("at_once_s", [0.0, LIMIT_S])
async def test_a_stage_is_well_again_after_device_errors(at_once_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shards(bounds=()).stages[0]
    forward, num_failing = shard.runner.rows, MAX_FAILED_STEPS

    def rows(*args: Any) -> torch.Tensor:
        nonlocal num_failing
        num_failing -= 1
        if num_failing >= 0:
            raise RuntimeError("a device error")
        return forward(*args)

    async with alone(shard, at_once_s) as (host, peer):
        monkeypatch.setattr(shard.runner, "rows", rows)
        stream = await peer.stream(CHAIN)
        for request_id in range(1, MAX_FAILED_STEPS + 1):
            assert isinstance(await send(stream, next(packet_frames(packet(request_id)))), WorkerFailed)
        await wait_until(lambda: not host.stage.engine.is_well)  # an answer may leave before its step has ended
        assert isinstance(await send(stream, next(packet_frames(packet(MAX_FAILED_STEPS + 1)))), Packet)
        await wait_until(lambda: host.stage.engine.is_well)
        stream.cancel()


async def test_hidden_states_that_are_no_numbers_are_refused() -> None:
    async with alone(shards().stages[1]) as (_, peer):
        stream = await peer.stream(CHAIN)
        session = PacketSession(0, 1, 0, hashes=(1, 2))
        for value, kind in ((torch.nan, InvalidPacket), (1.0, Packet)):
            payload = to_payload(torch.full((2, 32), value))
            sent = Packet(1, StepKind.PREFILL, 32, PayloadType.FP32, -1, 0, (session,), payload)
            assert type(await send(stream, next(packet_frames(sent)))) is kind
        stream.cancel()


async def test_a_message_beyond_grpcs_limit_ends_the_stream_and_not_the_stage() -> None:
    async with alone(shards(bounds=()).stages[0]) as (_, peer):
        stream = await peer.stream(CHAIN)
        with pytest.raises(SpecSplitError):
            await send(stream, bytes(17 << 20))
        again = await peer.stream(CHAIN)
        assert isinstance(await send(again, next(packet_frames(packet(1)))), Packet)
        again.cancel()


async def test_packets_in_several_frames_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_remote(shards("coordinator")) as chain:
        text = await plain_text(chain.target, [5, 6, 7, 8, 9], PARAMS, 3)
        monkeypatch.setattr("specsplit.stages.wire.frames.PIECE_BYTES", 100)
        assert await plain_text(chain.target, [5, 6, 7, 8, 9], PARAMS, 3) == text


async def test_calls_of_another_or_an_older_chain_are_refused() -> None:
    async with alone(shards(bounds=()).stages[0]) as (_, peer):
        other, older = ChainId("other", 1), ChainId("me", 0)
        with pytest.raises(PeerMismatch, match="not configured for this coordinator"):
            await peer.end(other, 0)
        with pytest.raises(PeerMismatch):
            await peer.stream(other)
        with pytest.raises(StaleEpoch):
            await peer.stream(older)
        with pytest.raises(StaleEpoch):
            await peer.configure(CHAIN, 0, 1, "", keep_slots=True)
        with pytest.raises(InvalidRequest, match="no stage 2 among 2"):
            await peer.configure(ChainId("me", 2), 2, 2, "", keep_slots=True)
        with pytest.raises(InvalidRequest, match="address of the next"):
            await peer.configure(ChainId("me", 2), 0, 2, "", keep_slots=True)
        assert await peer.configure(ChainId("me", 2), 0, 1, "", keep_slots=True)
        assert not await peer.configure(other, 0, 1, "", keep_slots=True), "nobody used it, and its slots are not ours"


async def test_a_slot_travels_whole_or_not_at_all() -> None:
    async with alone(shards(bounds=()).stages[0]) as (host, peer), alone(other_shard(0, 3)) as (_, to):
        stream = await peer.stream(CHAIN)
        await send(stream, next(packet_frames(packet(1))))
        state = await host.stage.engine.export_kv(0)
        assert state.num_rows == 3

        async def pieces(damage: int = 0, repeat: int = 1) -> AsyncIterator[bytes]:
            for _ in range(repeat):
                for piece in slot_pieces(encode_state(state)):
                    message = stage_pb2.SlotPiece.FromString(piece)
                    message.data = bytes([message.data[0] ^ damage]) + message.data[1:]
                    yield message.SerializeToString()

        with pytest.raises(CorruptPacket):
            await to.import_slot(CHAIN, pieces(damage=1), LIMIT_S)  # type: ignore[arg-type]
        with pytest.raises(InvalidPacket, match="exceeds"):
            await to.import_slot(CHAIN, pieces(repeat=2000), LIMIT_S)  # type: ignore[arg-type]
        assert await peer.move_slot(CHAIN, 0, to, LIMIT_S) > 0
        assert await peer.move_slot(CHAIN, 1, to, LIMIT_S) == 0, "nothing to move"
        with pytest.raises(InvalidPacket, match="no slot 9"):
            await peer.move_slot(CHAIN, 9, to, LIMIT_S)
        stream.cancel()


async def test_a_stream_that_does_not_say_who_opens_it_is_refused() -> None:
    async with alone(shards(bounds=()).stages[0]) as (host, _):
        channel = WorkerChannel(host.address, "The stage", "stage", ON_LOOPBACK)
        for first in (b"", b"\xff\xff", next(packet_frames(packet(1)))):
            stream = channel.duplex("/specsplit.v1.StageService/Forward")
            await stream.write(first)
            with pytest.raises(InvalidRequest):
                await stream.read()
        await channel.aclose()
        await asyncio.sleep(0)
        await wait_until(lambda: host.server.num_running == 0)


async def test_a_stream_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsplit.stages.wire.servicer.HELLO_S", 0.05)
    async with alone(shards(bounds=()).stages[0]) as (host, _):
        channel = WorkerChannel(host.address, "The stage", "stage", ON_LOOPBACK)
        stream = channel.duplex("/specsplit.v1.StageService/Forward")
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(InvalidRequest, match="begins with who opens it"):
                await stream.read()
            await wait_until(lambda: host.server.num_running == 0)
        await channel.aclose()


@pytest.mark.parametrize("keep_slots", [True, False])
async def test_a_stage_whose_coordinator_never_opens_its_stream_frees_the_slots(keep_slots: bool) -> None:
    async with alone(shards(bounds=()).stages[0]) as (host, peer):
        stream = await peer.stream(CHAIN)
        assert isinstance(await send(stream, next(packet_frames(packet(1)))), Packet)
        state = await host.stage.engine.export_kv(0)
        service = host.service
        await peer.configure(ChainId("me", 2), 0, 1, "", keep_slots=True)
        assert (await host.stage.engine.export_kv(0)).num_rows == 3

        async def import_kv(state: SlotState) -> None:
            await host.stage.engine.import_kv(state)
            service.set_grace(0.05)  # from now on the coordinator is not waited for

        if keep_slots:
            service.set_grace(0.05)
        host.stage.import_kv = import_kv
        await peer.configure(ChainId("me", 3), 0, 1, "", keep_slots=keep_slots)
        if not keep_slots:  # slots that were moved here, for a chain that was never made

            async def pieces() -> AsyncIterator[bytes]:
                for piece in slot_pieces(encode_state(state)):
                    yield piece

            await peer.import_slot(ChainId("me", 3), pieces(), LIMIT_S)  # type: ignore[arg-type]
        await wait_until(lambda: host.stage.engine.num_rows[0] == 0)
        stream.cancel()


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
async def test_no_stage_but_the_last_one_may_answer(ends: EndsAt) -> None:
    async with opened_remote(shards(ends)) as chain:
        text = await plain_text(chain.target, [5, 6, 7, 8, 9], PARAMS, 3)
        engine = chain.hosts[0].stage.engine
        forward, stands_wrong = engine.forward, True

        async def forged(packet: Packet) -> Packet:
            passed = await forward(packet)
            if not stands_wrong:
                return passed
            answers = [
                PacketSession(one.slot, one.epoch, one.start, num_logits=1, picks=(7,) if one.head_request else ())
                for one in packet.sessions
            ]
            payload = b"" if ends == "stages" else bytes(passed.payload)[-4 * 32 :]
            return replace(passed, stage_to=-1, sessions=tuple(answers), payload=payload)

        engine.forward = forged  # type: ignore[method-assign]
        with pytest.raises(
            InvalidPacket, match=rf"The stage at {chain.hosts[0].address} answered as stage 0; only .* 2"
        ):
            await plain_text(chain.target, [5, 6, 7, 8, 9], PARAMS, 3)
        stands_wrong = False
        assert await plain_text(chain.target, [5, 6, 7, 8, 9], PARAMS, 3) == text
        last = chain.hosts[2].stage.engine
        forward_last = last.forward

        async def lying_about_itself(packet: Packet) -> Packet:
            return replace(await forward_last(packet), stage_from=1)

        last.forward = lying_about_itself  # type: ignore[method-assign]
        with pytest.raises(InvalidPacket, match="answered as stage 1; only"):
            await plain_text(chain.target, [5, 6, 7, 8, 9], PARAMS, 3)
