"""Frames of stage streams: what protobuf would write, without its copies; whatever arrives, a typed error at worst."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core import errors
from specsplit.core.errors import CorruptPacket, InvalidPacket, NoFreeSlot, SpecSplitError, StageBehind, WorkerFailed
from specsplit.rpc.pb import stage_pb2
from specsplit.stages.codec import decode, encode
from specsplit.stages.packet import Packet, PacketSession, PayloadType, StepKind
from specsplit.stages.wire.frames import PIECE_BYTES, FrameReader, PieceRoom, error_frame, error_in, packet_frames
from specsplit.stages.wire.pipeline_stage import Outbox
from specsplit.telemetry import spans
from specsplit.telemetry.setup import trace_to_file


def packet(num_rows: int, hidden_size: int = 32) -> Packet:
    session = PacketSession(0, 1, 0, hashes=tuple(range(1, num_rows + 1)))
    payload = bytes(index % 251 for index in range(4 * hidden_size)) * num_rows
    return Packet(7, StepKind.PREFILL, hidden_size, PayloadType.FP32, 0, 1, (session,), payload)


def test_the_service_has_the_names_of_the_protocol() -> None:
    service = stage_pb2.DESCRIPTOR.services_by_name["StageService"]
    assert {method.name for method in service.methods} == {
        "Configure", "Forward", "EndSession", "Ping", "Stats", "ExportKV", "ImportKV",
    }  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 2, 3, 40, 300])
def test_a_packets_frame_is_what_protobuf_reads_and_begins_aligned(num_rows: int) -> None:
    (data,) = packet_frames(packet(num_rows))
    whole = b"".join(encode(packet(num_rows)))
    assert stage_pb2.Frame.FromString(data).packet == whole
    assert data.find(b"SSPK") % 64 == 0
    received = FrameReader("a link").read(data)
    assert isinstance(received, memoryview)
    assert received.obj is data, "not copied"
    assert decode(received) == packet(num_rows)


TRACES = (f"00-{'a' * 32}-{'b' * 16}-01",)


def test_traces_travel_beside_a_packet_and_older_readers_skip_them() -> None:
    traced = replace(packet(3), traces=TRACES)
    (data,) = packet_frames(traced)
    assert data.find(b"SSPK") % 64 == 0
    reader = FrameReader("a link")
    received = reader.read(data)
    assert isinstance(received, memoryview)
    assert received.obj is data, "not copied"
    assert reader.traces == TRACES == tuple(stage_pb2.Frame.FromString(data).traceparent)
    assert decode(received, traces=reader.traces).traces == TRACES
    # A reader that does not know the field reads the frame through protobuf, which passes over it.
    assert stage_pb2.Frame.FromString(data).packet == b"".join(encode(packet(3)))
    assert reader.read(next(packet_frames(packet(3)))) == b"".join(encode(packet(3)))
    assert reader.traces == ()


@pytest.mark.parametrize("traces", [TRACES * 2, ("x",), ("x" * 200,), (TRACES[0][:-1] + "\u20ac",)])
def test_traces_that_make_no_sense_cost_no_packet(traces: tuple[str, ...]) -> None:
    frame = stage_pb2.Frame(packet=b"".join(encode(packet(2))), traceparent=traces)
    reader = FrameReader("a link")
    received = reader.read(frame.SerializeToString())
    assert isinstance(received, bytes | memoryview)
    assert decode(received, traces=reader.traces) == packet(2)
    with trace_to_file(Path(os.devnull)):
        assert all(spans.extract([("traceparent", trace)]) is None for trace in traces if trace not in TRACES)


def test_traces_of_a_large_packet_come_with_its_last_piece() -> None:
    large = replace(packet(600, hidden_size=4096), traces=TRACES)
    reader = FrameReader("a link")
    *first, last = [reader.read(frame) for frame in packet_frames(large)]
    assert first
    assert set(first) == {None}
    assert isinstance(last, bytes)
    assert decode(last, traces=reader.traces).traces == TRACES


def test_a_packet_as_protobuf_writes_it_is_read_too() -> None:
    whole = b"".join(encode(packet(3)))
    assert FrameReader("a link").read(stage_pb2.Frame(packet=whole).SerializeToString()) == whole


def test_a_large_packet_travels_in_frames_that_fit_a_message() -> None:
    large = packet(300, 1 << 13)
    frames = list(packet_frames(large))
    assert len(frames) == 3
    assert max(map(len, frames)) <= PIECE_BYTES + 200
    reader = FrameReader("a link")
    *early, last = [reader.read(frame) for frame in frames]
    assert early == [None, None]
    assert last is not None
    assert not isinstance(last, stage_pb2.Frame)
    assert decode(last) == large
    assert reader.read(next(packet_frames(packet(2)))) == b"".join(encode(packet(2)))


def test_a_packet_that_never_ends_is_refused_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsplit.stages.wire.frames.MAX_PACKET_BYTES", 100)
    reader = FrameReader("a link")
    piece = stage_pb2.Frame(packet=b"x" * 60, more=True).SerializeToString()
    assert [reader.read(piece) for _ in range(5)] == [None] * 5
    with pytest.raises(InvalidPacket, match="exceeds the limit"):
        reader.read(stage_pb2.Frame(packet=b"x").SerializeToString())
    assert reader.read(stage_pb2.Frame(packet=b"whole").SerializeToString()) == b"whole"
    monkeypatch.setattr("specsplit.stages.wire.frames.PIECE_BYTES", 10)
    with pytest.raises(InvalidPacket, match="exceeds the limit"):
        list(packet_frames(packet(1)))


def test_links_share_the_room_for_what_has_not_come_whole() -> None:
    room = PieceRoom(11_000)
    first, second = FrameReader("a link", room), FrameReader("another link", room)
    piece = stage_pb2.Frame(packet=b"x" * 6000, more=True).SerializeToString()
    last = stage_pb2.Frame(packet=b"y").SerializeToString()
    assert (first.read(piece), second.read(piece), second.read(piece)) == (None, None, None)
    with pytest.raises(NoFreeSlot, match="no room for another large packet"):
        second.read(last)
    assert second.read(last) == b"y", "a packet in one piece takes no room"
    assert first.read(last) == b"x" * 6000 + b"y"
    assert second.read(piece) is None
    second.close()
    assert first.read(piece) is None, "the room of a stream that ends is free"
    assert first.read(last) == b"x" * 6000 + b"y"


def test_pieces_of_a_byte_take_room_for_what_holds_them() -> None:
    reader = FrameReader("a link", PieceRoom(10 * 4096))
    for _ in range(11):
        assert reader.read(stage_pb2.Frame(packet=b"x", more=True).SerializeToString()) is None
    assert reader.num_pieces == 0
    with pytest.raises(NoFreeSlot, match="no room for another large packet"):
        reader.read(stage_pb2.Frame(packet=b"x").SerializeToString())


def test_a_trace_that_is_none_is_not_passed_on() -> None:
    reader = FrameReader("a link")
    (frame,) = packet_frames(replace(packet(1), traces=("x" * 300, TRACES[0], "\u20ac" * 55)))
    assert reader.read(frame) is not None
    assert reader.traces == ("", TRACES[0], "")


def test_an_empty_piece_is_refused_and_kept_nowhere() -> None:
    reader = FrameReader("a link")
    for _ in range(3):
        with pytest.raises(InvalidPacket, match="An empty piece"):
            reader.read(stage_pb2.Frame(more=True).SerializeToString())
    assert reader.num_pieces == 0
    assert reader.read(stage_pb2.Frame(packet=b"whole").SerializeToString()) == b"whole"


@given(st.binary(max_size=120), st.sampled_from([b"", b"\x0a\x00\x12", b"\x0a\x3c" + bytes(60) + b"\x12", b"\x22\x05"]))
def test_whatever_arrives_is_a_packet_a_frame_or_damage(data: bytes, start: bytes) -> None:
    try:
        received = FrameReader("a link").read(start + data)
    except (CorruptPacket, InvalidPacket):
        return
    if received is not None and not isinstance(received, stage_pb2.Frame):
        with pytest.raises(SpecSplitError):
            decode(received)


@pytest.mark.parametrize(
    "error",
    [StageBehind({0: 0, 3: 17}), CorruptPacket("a link"), InvalidPacket("Not a number."), errors.StaleEpoch("Over.")],
)
def test_an_error_comes_back_as_itself(error: SpecSplitError) -> None:
    frame = FrameReader("a link").read(error_frame(error, 5))
    assert isinstance(frame, stage_pb2.Frame)
    back = error_in(frame.error, "The stage at x:1")
    assert (type(back), str(back), frame.error.request_id) == (type(error), str(error), 5)
    assert getattr(back, "have", None) == getattr(error, "have", None)
    about_the_link = FrameReader("a link").read(error_frame(error, after=9))
    assert isinstance(about_the_link, stage_pb2.Frame)
    assert (about_the_link.error.HasField("request_id"), about_the_link.error.after) == (False, 9)


def test_an_error_outside_the_tree_leaks_nothing() -> None:
    assert b"secret" not in error_frame(RuntimeError("a secret"), 5)
    for status in (b"", b"\xff\xff", b"\x08\x63"):
        assert isinstance(error_in(stage_pb2.PacketError(status=status), "The stage at x:1"), WorkerFailed)


async def test_a_stream_whose_answers_are_not_read_ends() -> None:
    outbox = Outbox()
    for _ in range(1024):
        outbox.put_nowait(b"an error")
    assert await anext(outbox) == b"an error"
    for _ in range(2):
        outbox.put_nowait(b"an error")
    with pytest.raises(InvalidPacket, match="not read"):
        await anext(outbox)
