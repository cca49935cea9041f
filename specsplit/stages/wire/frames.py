"""Frames between coordinator and stages as bytes and back: packets without needless copies, errors, greetings.

A packet's frame is written and read by hand, the way protobuf has it: its bytes are joined once and never copied when
read, and begin at a multiple of 64, as the packet's payload wants it. Knows no streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from specsplit.core.errors import CorruptPacket, InvalidPacket, NoFreeSlot, SpecSplitError
from specsplit.limits import MAX_PACKET_BYTES, MAX_UNFINISHED_BYTES
from specsplit.rpc.pb import stage_pb2
from specsplit.rpc.status import error_said, status_of
from specsplit.stages.codec import encode
from specsplit.stages.packet import Buffer, Packet

PIECE_BYTES = 4 << 20
"""A larger packet travels in several frames, so that none meets gRPC's limit of a message."""
_PADDING, _PACKET, _MORE, _TRACE = 0x0A, 0x12, b"\x18\x01", 0x4A
_TRACE_CHARACTERS = 55
"""Length of a W3C trace context; another one is none."""
_ALIGNMENT = 64
_LEAST_ROOM = 4096
"""Bytes of room that a piece takes at least: what holds it takes memory as well."""


@dataclass(frozen=True, slots=True)
class ChainId:
    """A chain as one coordinator has configured it; a higher number is newer."""

    coordinator: str
    number: int
    secret: bytes = field(default=b"", repr=False, compare=False)
    """Known to the coordinator that drew it; travels with Configure and in no other message."""

    def message(self) -> stage_pb2.ChainId:
        return stage_pb2.ChainId(coordinator=self.coordinator, number=self.number)

    @classmethod
    def of(cls, message: stage_pb2.ChainId) -> ChainId:
        return cls(message.coordinator, message.number)


READY = stage_pb2.Frame(ready=stage_pb2.Ready()).SerializeToString()
LEAVING = stage_pb2.Frame(leaving=True).SerializeToString()
DRAINING = stage_pb2.Frame(draining=True).SerializeToString()


def hello_frame(chain: ChainId, role: stage_pb2.StreamRole.ValueType) -> bytes:
    """Return the frame that begins a stream."""
    return stage_pb2.Frame(hello=stage_pb2.Hello(chain=chain.message(), role=role)).SerializeToString()


def packet_frames(packet: Packet) -> Iterator[bytes]:
    """Give the packet's frames: one, or several of at most PIECE_BYTES of it each."""
    buffers = encode(packet)
    num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
    if num_bytes <= PIECE_BYTES:
        yield _framed(buffers, num_bytes, _traced(packet.traces))
        return
    if num_bytes > MAX_PACKET_BYTES:
        raise InvalidPacket(f"A stage packet of {num_bytes} bytes exceeds the limit of {MAX_PACKET_BYTES}.")
    whole = memoryview(b"".join(buffers))
    for start in range(0, num_bytes, PIECE_BYTES):
        piece = whole[start : start + PIECE_BYTES]
        yield _framed([piece], piece.nbytes, _MORE if start + PIECE_BYTES < num_bytes else _traced(packet.traces))


def _traced(traces: tuple[str, ...]) -> bytes:
    """Return the field of the trace contexts, empty if there are none."""
    own = [trace if len(trace) == _TRACE_CHARACTERS else b"" for trace in map(str.encode, traces)]
    return b"".join([bytes([_TRACE, len(trace)]) + trace for trace in own])


def _framed(buffers: list[Buffer], num_bytes: int, rest: bytes) -> bytes:
    tag = bytes([_PACKET]) + _varint(num_bytes)
    # [padding field: 2 bytes + zeros | packet's tag and length | packet]: the packet begins at a multiple of 64, so its
    # payload, which begins at one within the packet, can be a tensor in place.
    padding = -(2 + len(tag)) % _ALIGNMENT
    return b"".join([bytes([_PADDING, padding]), bytes(padding), tag, *buffers, rest])


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


class PieceRoom:
    """Bytes that pieces may take until what they are of has come whole, over all streams of one end."""

    def __init__(self, num_bytes: int = MAX_UNFINISHED_BYTES) -> None:
        self._num_free = num_bytes

    def take(self, num_bytes: int) -> None:
        """Take room for a piece, to be given back when the whole is here or given up.

        Raises:
            NoFreeSlot: there is none.
        """
        if num_bytes > self._num_free:
            raise NoFreeSlot("There is no room for another large packet or slot until others have come whole.")
        self._num_free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give back the room of pieces."""
        self._num_free += num_bytes


class FrameReader:
    """Turns the frames of one stream into packets' bytes and other frames; `link` names the stream in errors.

    Pieces take room in `room`, which readers may share.
    """

    def __init__(self, link: str, room: PieceRoom | None = None) -> None:
        self.link = link
        self.num_bytes = 0
        """Bytes of packets read."""
        self.traces: tuple[str, ...] = ()
        """Trace contexts beside the packet that came last."""
        self._room = room or PieceRoom()
        self._pieces: list[Buffer] = []
        self._piece_bytes = self._held_bytes = 0
        self._refusal: SpecSplitError | None = None
        """The reason why the packet that is coming is not kept."""

    @property
    def num_pieces(self) -> int:
        """Return the pieces at hand of a packet that has not come whole."""
        return len(self._pieces)

    def close(self) -> None:
        """Give up the pieces at hand, and their room."""
        self._room.give_back(self._held_bytes)
        self._pieces, self._held_bytes = [], 0

    def read(self, data: bytes) -> Buffer | stage_pb2.Frame | None:
        """Return a packet's bytes, a view of `data` where it came whole; another frame; None where more follows.

        Raises:
            CorruptPacket: it is no frame.
            InvalidPacket: the packet was too large, or a piece of it is empty.
            NoFreeSlot: there was no room for its pieces.
        """
        found = _split(data)
        if found is None:
            frame = stage_pb2.Frame()
            try:
                frame.ParseFromString(data)
            except DecodeError as error:
                raise CorruptPacket(self.link) from error
            if frame.WhichOneof("other") is not None:
                return frame
            found = frame.packet, frame.more, tuple(frame.traceparent)
        packet, has_more, self.traces = found
        return self._joined(packet, has_more)

    def _joined(self, piece: Buffer, has_more: bool) -> Buffer | None:
        num_bytes = memoryview(piece).nbytes
        if has_more and not num_bytes:
            raise InvalidPacket(f"An empty piece of a stage packet came over {self.link}.")
        self.num_bytes += num_bytes
        if not (has_more or self._piece_bytes):
            return piece
        self._piece_bytes += num_bytes
        # A packet that is refused is read to its end without keeping it: the stream stays in step.
        if self._refusal is None:
            self._keep(piece, num_bytes)
        if has_more:
            return None
        pieces, refusal = self._pieces, self._refusal
        self.close()
        self._piece_bytes, self._refusal = 0, None
        if refusal is not None:
            raise refusal
        return b"".join(pieces)

    def _keep(self, piece: Buffer, num_bytes: int) -> None:
        """Keep a piece until its packet is whole, or note why the packet is refused."""
        try:
            if self._piece_bytes > MAX_PACKET_BYTES:
                raise InvalidPacket(f"A stage packet over {self.link} exceeds the limit of {MAX_PACKET_BYTES} bytes.")
            room = max(num_bytes, _LEAST_ROOM)
            self._room.take(room)
        except SpecSplitError as error:
            self._refusal = error
            self.close()
        else:
            self._held_bytes += room
            self._pieces.append(piece)


def _split(data: bytes) -> tuple[memoryview, bool, tuple[str, ...]] | None:
    """Return the packet of a frame as `_framed` writes it, whether more follows, traces; None of any other frame."""
    if len(data) < 4 or data[0] != _PADDING or data[1] >= _ALIGNMENT:
        return None
    at = tag = 2 + data[1]
    if tag >= len(data) or data[tag] != _PACKET:
        return None
    size = shift = 0
    for at in range(tag + 1, min(tag + 6, len(data))):
        size |= (data[at] & 0x7F) << shift
        shift += 7
        if data[at] < 0x80:
            break
    rest = data[at + 1 + size :]
    traces = () if rest in (b"", _MORE) else _traces_in(rest)
    if at + 1 + size > len(data) or traces is None:
        return None
    return memoryview(data)[at + 1 : at + 1 + size], rest == _MORE, traces


def _traces_in(rest: bytes) -> tuple[str, ...] | None:
    """Return the trace contexts behind a packet as `_traced` writes them; None if there is anything else."""
    traces: list[str] = []
    at = 0
    while at + 1 < len(rest) and rest[at] == _TRACE and rest[at + 1] in (0, _TRACE_CHARACTERS):
        end = at + 2 + rest[at + 1]
        traces.append(rest[at + 2 : end].decode("ascii", "replace"))
        at = end
    return tuple(traces) if at == len(rest) else None


def error_frame(error: Exception, request_id: int | None = None, after: int = 0) -> bytes:
    """Return the frame with the reason why a packet has no answer; without its id, why none after `after` has one."""
    message = stage_pb2.PacketError(request_id=request_id, after=after, status=status_of(error).SerializeToString())
    return stage_pb2.Frame(error=message).SerializeToString()


def error_in(message: stage_pb2.PacketError, peer: str) -> SpecSplitError:
    """Return the error that `error_frame` was given; `peer` names the stage at the start of a sentence."""
    return error_said(message.status, peer)
