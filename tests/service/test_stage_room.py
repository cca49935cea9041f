"""What has not come whole takes the room of one packet, and of one slot, over all streams to a stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from specsplit.core.errors import CorruptPacket, NoFreeSlot
from specsplit.rpc.pb import stage_pb2
from specsplit.stages.packet import Packet
from specsplit.stages.slot_state import encode_state
from specsplit.stages.wire.frames import PieceRoom, packet_frames
from specsplit.stages.wire.messages import slot_pieces
from tests.service.test_stage_refusals import CHAIN, alone, framed, other_shard, packet, send
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import wait_until
from tests.support.small_target import shards


async def test_slots_that_arrive_have_the_room_of_one_together() -> None:
    async with alone(shards(bounds=()).stages[0]) as (host, peer), alone(other_shard(0, 3)) as (other, to):
        stream, is_over = await peer.stream(CHAIN), asyncio.Event()
        await send(stream, next(packet_frames(packet(1))))
        state, limit = await host.stage.engine.export_kv(0), other.stage.engine.identity.slot_bytes

        async def endless() -> AsyncIterator[bytes]:
            yield stage_pb2.SlotPiece(data=bytes(limit)).SerializeToString()
            await is_over.wait()

        async def whole() -> AsyncIterator[bytes]:
            for piece in slot_pieces(encode_state(state)):
                yield piece

        async def refused() -> bool:
            try:
                await to.import_slot(CHAIN, whole(), LIMIT_S)  # type: ignore[arg-type]
            except NoFreeSlot:
                return True
            return False

        holding = asyncio.create_task(to.import_slot(CHAIN, endless(), LIMIT_S))  # type: ignore[arg-type]
        await wait_until(lambda: other.server.num_running == 1)
        await to.ping()  # its answer comes behind the piece
        async with asyncio.timeout(LIMIT_S):
            while not await refused():  # noqa: ASYNC110 - the other call sets no event here
                await asyncio.sleep(0)
        is_over.set()
        with pytest.raises(CorruptPacket):
            await holding
        assert not await refused()
        stream.cancel()


async def test_packets_that_do_not_end_have_one_room_over_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsplit.stages.wire.servicer.PieceRoom", lambda num_bytes=11_000: PieceRoom(num_bytes))
    async with alone(shards(bounds=()).stages[0]) as (_, peer):
        unfinished = stage_pb2.Frame(packet=bytes(6000), more=True).SerializeToString()
        stream, good = await peer.stream(CHAIN), next(packet_frames(packet(2)))
        assert isinstance(await send(stream, next(packet_frames(packet(1)))), Packet)
        await stream.write(unfinished)
        await stream.write(unfinished)
        assert isinstance(await send(stream, framed(b"the last piece")), NoFreeSlot)
        assert isinstance(await send(stream, good), Packet), "the stream is in step"
        await stream.write(unfinished)
        again = await peer.stream(CHAIN)  # takes the place of the first
        await again.write(unfinished)
        assert isinstance(await send(again, framed(b"the last piece")), CorruptPacket), "whole, and no packet"
        again.cancel()
