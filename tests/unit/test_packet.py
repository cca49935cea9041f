"""Stage packets: what goes in comes out, and whatever else arrives is a typed error, never a crash."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core.errors import CorruptPacket, InvalidPacket
from specsplit.core.types import SamplingParams, SessionParams, TokenLogProb
from specsplit.stages.codec import decode, encode
from specsplit.stages.packet import (
    COORDINATOR,
    HeadRequest,
    KeepList,
    Packet,
    PacketSession,
    PayloadType,
    StepKind,
    check_answer,
)
from specsplit.stages.slot_state import PendingRows, SlotState, decode_state, encode_state

HASHES = st.integers(0, (1 << 64) - 1)
IDS = st.integers(0, (1 << 32) - 1)
CRC_AT = 61
"""Where the crc32 lies: behind the other fields of the header."""


@st.composite
def asks(draw: st.DrawFn) -> HeadRequest:
    biases = draw(st.lists(st.tuples(IDS, st.floats(-100, 100)), max_size=3))
    sampling = SamplingParams(
        temperature=draw(st.floats(0, 2)),
        top_p=draw(st.floats(0.1, 1)),
        top_k=draw(st.integers(0, 50)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=tuple(biases),
    )
    top = draw(st.sampled_from([None, 0, 20]))
    params = SessionParams(sampling, draw(HASHES), draw(st.integers(0, 9)), draw(st.integers(0, 99)), top_logprobs=top)
    return HeadRequest(params, draw(st.sampled_from([(), (7,)])))


@st.composite
def packet_sessions(draw: st.DrawFn, slot: int, *, is_answer: bool) -> PacketSession:
    place = {"slot": slot, "epoch": draw(HASHES), "start": draw(IDS)}
    count = draw(st.integers(1, 6))
    if is_answer:
        picks = draw(st.sampled_from([(), tuple(range(-1, count - 1))]))
        likeliest = st.lists(st.tuples(IDS, st.floats(-99, 0, width=32)), max_size=20).map(tuple)
        tokens = st.builds(TokenLogProb, st.floats(-99, 0), draw(st.sampled_from([likeliest, st.just(())])))
        log_probs = draw(st.lists(tokens, max_size=count))
        return PacketSession(**place, num_logits=count, picks=picks, log_probs=tuple(log_probs))
    parents = tuple(draw(st.integers(-1, row - 1)) for row in range(count))
    rows = sorted(draw(st.sets(st.integers(0, 70), max_size=4)))
    return PacketSession(
        **place,
        base_hash=draw(HASHES),
        hashes=tuple(draw(st.lists(HASHES, min_size=count, max_size=count))),
        parents=draw(st.sampled_from([None, parents])),
        keep=draw(st.sampled_from([None, KeepList(draw(HASHES), tuple(rows))])),
        token_ids=draw(st.sampled_from([(), tuple(range(count))])),
        num_logits=draw(st.integers(1, count)),
        head_request=draw(st.none() | asks()),
    )


@st.composite
def packets(draw: st.DrawFn) -> Packet:
    is_answer = draw(st.booleans())
    slots = draw(st.lists(st.integers(0, 1 << 31), min_size=1, max_size=3, unique=True))
    packet = Packet(
        request_id=draw(HASHES),
        step_kind=draw(st.sampled_from(StepKind)),
        hidden_size=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from([PayloadType.FP32, PayloadType.BF16, PayloadType.FP16])),
        stage_from=draw(st.integers(COORDINATOR, 90)),
        stage_to=COORDINATOR if is_answer else draw(st.integers(0, 90)),
        sessions=tuple(draw(packet_sessions(slot, is_answer=is_answer)) for slot in slots),
    )
    size = packet.num_rows * packet.hidden_size * packet.dtype.itemsize
    return replace(packet, payload=draw(st.sampled_from([b"", bytes(i % 251 for i in range(size))])))


def written(packet: Packet) -> bytes:
    return b"".join(encode(packet))


def packet_of(**changes: Any) -> Packet:
    session = PacketSession(slot=2, epoch=3, start=9, base_hash=5, hashes=(1, 2, 3), parents=(-1, 0, 0))
    values = {"sessions": (session,), "payload": bytes(3 * 4 * 4), **changes}
    return Packet(8, StepKind.VERIFY, 4, PayloadType.FP32, 0, 1, **values)


def resealed(data: bytes) -> bytes:
    """Return the bytes with a crc that fits them."""
    crc = zlib.crc32(data[CRC_AT + 4 :], zlib.crc32(data[:CRC_AT]))
    return data[:CRC_AT] + struct.pack("<I", crc) + data[CRC_AT + 4 :]


@given(packets())
def test_a_packet_comes_back_as_it_was(packet: Packet) -> None:
    back = decode(written(packet))
    assert back == replace(packet, payload=back.payload)
    assert bytes(back.payload) == bytes(packet.payload)


def test_the_header_has_the_fields_of_the_protocol() -> None:
    packet = packet_of()
    assert (packet.batch, packet.seq, packet.num_tokens) == (1, 3, 3)
    fixed = struct.unpack_from("<4sHQIQBIIIBBIhhIQI", written(packet))
    body_bytes = fixed[-3]
    assert fixed[:-3] == (b"SSPK", 1, 8, 2, 3, StepKind.VERIFY, 1, 3, 4, PayloadType.FP32, 0, 9, 0, 1)
    assert fixed[-2] == 3 * 4 * 4
    assert body_bytes == 33 + 3 * 8 + 3 * 2


def test_the_payload_is_neither_copied_when_written_nor_when_read() -> None:
    payload = bytearray(range(48))
    buffers = encode(packet_of(payload=memoryview(payload)))
    assert buffers[-1].obj is payload  # type: ignore[union-attr]
    data = b"".join(buffers)
    back = decode(data)
    assert back.payload.obj is data  # type: ignore[union-attr]
    assert (len(data) - 48) % 64 == 0, "tensors lie right on it"


@given(st.binary(max_size=400))
def test_random_bytes_are_a_damaged_packet(data: bytes) -> None:
    with pytest.raises(CorruptPacket) as raised:
        decode(data, "the link to stage 1")
    assert raised.value.link == "the link to stage 1"


@given(packets(), st.integers(0, 1 << 30), st.integers(0, 7))
def test_any_bit_flipped_is_a_damaged_packet(packet: Packet, place: int, bit: int) -> None:
    data = bytearray(written(packet))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(CorruptPacket):
        decode(data)


@given(packets(), st.integers(0, 1 << 30))
def test_a_packet_cut_short_or_too_long_is_damaged(packet: Packet, length: int) -> None:
    data = written(packet)
    for other in (data[: length % len(data)], data + bytes(1 + length % 70)):
        with pytest.raises(CorruptPacket):
            decode(other)


@given(packets(), st.lists(st.tuples(st.integers(4, 1 << 30), st.binary(min_size=1, max_size=4)), max_size=3))
def test_nonsense_under_a_right_crc_is_a_typed_error(packet: Packet, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(written(packet))
    for place, other in changes:
        start = 4 + place % (len(data) - 4)
        data[start : start + len(other)] = other[: len(data) - start]
    try:
        back = decode(resealed(bytes(data)))
    except InvalidPacket:
        return
    assert isinstance(back, Packet)
    encode(back)


@given(packets(), st.binary(max_size=60), st.integers(0, 1 << 30))
def test_other_lengths_under_a_right_crc_are_invalid(packet: Packet, extra: bytes, length: int) -> None:
    data = written(packet)
    for other in (data[: CRC_AT + 4 + length % (len(data) - CRC_AT - 3)], data + b"\0" + extra):
        if len(other) != len(data):
            with pytest.raises(InvalidPacket):
                decode(resealed(other))


SCORE_TWO = HeadRequest(SessionParams(), (1, 2))
SESSION = packet_of().sessions[0]
MALFORMED: dict[str, Callable[[], object]] = {
    "a parent behind its row": lambda: replace(SESSION, parents=(-1, 1, 0)),
    "too few parents": lambda: replace(SESSION, parents=(-1, 0)),
    "a parent before the row in front": lambda: replace(SESSION, parents=(-2, 0, 0)),
    "too few token ids": lambda: replace(SESSION, token_ids=(1,)),
    "more wanted rows than rows": lambda: packet_of(sessions=(replace(SESSION, num_logits=4),)),
    "more to score than wanted": lambda: replace(SESSION, num_logits=1, head_request=SCORE_TWO),
    "no rows": lambda: packet_of(sessions=(PacketSession(2, 3, 9),), payload=b""),
    "no session": lambda: packet_of(sessions=(), payload=b""),
    "one slot twice": lambda: packet_of(sessions=(SESSION, SESSION), payload=bytes(6 * 16)),
    "too few hidden states": lambda: packet_of(payload=bytes(3 * 4 * 4 - 4)),
    "a keep-list out of order": lambda: KeepList(1, (2, 1)),
    "a keep-list with a row twice": lambda: KeepList(1, (2, 2)),
    "picks on the way down": lambda: packet_of(sessions=(replace(SESSION, num_logits=1, picks=(5,)),)),
    "rows in an answer": lambda: replace(packet_of(payload=b""), stage_to=COORDINATOR),
    "a compressed payload": lambda: replace(packet_of(), dtype=PayloadType.INT8_BLOCK),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_packet_cannot_be_made(name: str) -> None:
    with pytest.raises(InvalidPacket):
        MALFORMED[name]()


@pytest.mark.parametrize(
    ("field_at", "value"),
    [(4, b"\3\0"), (14, b"\7"), (26, b"\x63"), (27, b"\2"), (31, b"\4"), (39, b"\3"), (39, b"\x20"), (40, b"\1")],
    ids=["version", "session", "kind", "batch", "seq", "int8", "dtype", "layout"],
)
def test_a_lying_header_is_invalid(field_at: int, value: bytes) -> None:
    data = bytearray(written(packet_of()))
    data[field_at : field_at + len(value)] = value
    with pytest.raises(InvalidPacket):
        decode(resealed(bytes(data)))


def test_sampling_parameters_out_of_range_are_invalid() -> None:
    ask = HeadRequest(SessionParams(SamplingParams(temperature=0.5)))
    data = written(packet_of(sessions=(replace(SESSION, num_logits=1, head_request=ask),)))
    hot = data.replace(struct.pack("<d", 0.5), struct.pack("<d", -3.0))
    with pytest.raises(InvalidPacket, match="temperature"):
        decode(resealed(hot))


@pytest.mark.parametrize("top_logprobs", [None, 0, 3])
def test_packets_that_ask_for_no_log_probabilities_have_version_one(top_logprobs: int | None) -> None:
    ask = HeadRequest(SessionParams(top_logprobs=top_logprobs))
    data = written(packet_of(sessions=(replace(SESSION, num_logits=1, head_request=ask),)))
    assert data[4:6] == (b"\1\0" if top_logprobs is None else b"\2\0")
    assert decode(data).sessions[0].head_request == ask


def test_too_many_likeliest_tokens_are_invalid() -> None:
    top = tuple((token_id, -1.0) for token_id in range(21))
    answer = PacketSession(2, 3, 9, num_logits=1, picks=(4,), log_probs=(TokenLogProb(-1.0, top),))
    data = written(replace(packet_of(), sessions=(answer,), stage_to=COORDINATOR, payload=b""))
    with pytest.raises(InvalidPacket, match="21 likeliest"):
        decode(data)


def test_an_answer_to_something_else_is_invalid() -> None:
    packet = packet_of(sessions=(replace(SESSION, num_logits=2, head_request=HeadRequest(SessionParams())),))
    answer = replace(
        packet, sessions=(PacketSession(2, 3, 9, num_logits=2, picks=(4, 5)),), stage_to=COORDINATOR, payload=b""
    )
    check_answer(answer, packet)
    others = [
        replace(answer, request_id=7),
        replace(answer, sessions=(replace(answer.sessions[0], epoch=4),)),
        replace(answer, sessions=(replace(answer.sessions[0], num_logits=1, picks=()),)),
        replace(answer, sessions=(replace(answer.sessions[0], picks=()),)),
        replace(answer, sessions=(replace(answer.sessions[0], picks=(), log_probs=(TokenLogProb(-1.0),) * 2),)),
        replace(answer, payload=bytes(2 * 4 * 4)),
        replace(answer, dtype=PayloadType.BF16),
        packet,
    ]
    for other in others:
        with pytest.raises(InvalidPacket):
            check_answer(other, packet)
    with pytest.raises(InvalidPacket, match="hidden states"):
        check_answer(
            replace(answer, sessions=(replace(answer.sessions[0], picks=()),)),
            packet_of(sessions=(replace(SESSION, num_logits=2),)),
        )


STATE = SlotState(
    slot=1,
    epoch=4,
    length=2,
    first_layer=3,
    end_layer=5,
    dtype=PayloadType.BF16,
    hashes=(7, 8, 9, 10),
    token_ids=(1, 2, 3, 4),
    pending=PendingRows(99, 2, 2),
    payload=bytes(range(32)),
)


@pytest.mark.parametrize(
    "state", [STATE, replace(STATE, token_ids=(), pending=None), SlotState(0, 0, 0, 0, 1, PayloadType.FP32, ())]
)
def test_an_exported_slot_comes_back_as_it_was(state: SlotState) -> None:
    back = decode_state(b"".join(encode_state(state)))
    assert back == replace(state, payload=back.payload)
    assert bytes(back.payload) == state.payload


@given(st.integers(0, 1 << 30), st.integers(0, 7))
def test_a_damaged_slot_is_noticed(place: int, bit: int) -> None:
    data = bytearray(b"".join(encode_state(STATE)))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(CorruptPacket):
        decode_state(data)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_lying_slot_is_a_typed_error_or_well_formed(changes: list[tuple[int, int]]) -> None:
    data = bytearray(b"".join(encode_state(STATE)))
    for place, value in changes:
        data[8 + place] = value
    data[4:8] = struct.pack("<I", zlib.crc32(data[8:]))
    try:
        assert isinstance(decode_state(data), SlotState)
    except InvalidPacket:
        return
