"""The contents of one slot of one stage, on their way to another process that takes the stage's place.

Knows no tensors; the bytes are those of the layers' keys and values, trimmed to the rows in use.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import field

from specsplit.core.errors import CorruptPacket, InvalidPacket
from specsplit.core.record import record
from specsplit.limits import MAX_PACKET_ROWS
from specsplit.stages.packet import Buffer, PayloadType

_MAGIC = b"SSKV"
_CRC = struct.Struct("<4sI")
_HEADER = struct.Struct("<IQIIIIQIBIIQ")
_ALIGNMENT = 64


@record
class PendingRows:
    """Rows of the last packet, from which the next packet's keep-list chooses."""

    request_id: int
    start: int
    count: int


@record
class SlotState:
    """A slot of the layers `first_layer` to `end_layer` - 1: `num_rows` rows, the first `length` of them committed.

    `payload` is per layer its keys, then its values, each [heads, num_rows, head size] in `dtype`. `hashes` has one
    prefix hash per row; `token_ids` too, where token ids travel with packets, else none.
    """

    slot: int
    epoch: int
    length: int
    first_layer: int
    end_layer: int
    dtype: PayloadType
    hashes: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    pending: PendingRows | None = None
    payload: Buffer = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        # [0, length) is committed; a pending packet's rows reach to the end: [committed | pending].
        fits = self.length <= len(self.hashes) and len(self.token_ids) in (0, len(self.hashes))
        if self.pending is not None:
            fits = fits and self.pending.start + self.pending.count == len(self.hashes) >= self.length
            fits = fits and self.pending.count <= MAX_PACKET_ROWS
        if not fits:
            raise InvalidPacket("The rows of an exported slot do not fit each other.")

    @property
    def num_rows(self) -> int:
        return len(self.hashes)


def encode_state(state: SlotState) -> list[Buffer]:
    """Return the state's bytes as buffers; the last one is its payload, not copied."""
    pending = state.pending or PendingRows(0, 0, 0)
    payload = memoryview(state.payload).cast("B")
    body = _HEADER.pack(
        state.slot,
        state.epoch,
        state.length,
        state.num_rows,
        len(state.token_ids),
        1 if state.pending else 0,
        pending.request_id,
        pending.start,
        state.dtype,
        state.first_layer,
        state.end_layer,
        payload.nbytes,
    )
    body += struct.pack(f"<{state.num_rows}Q{len(state.token_ids)}I", *state.hashes, *state.token_ids)
    body += bytes(-(_CRC.size + len(body)) % _ALIGNMENT)
    return [_CRC.pack(_MAGIC, zlib.crc32(payload, zlib.crc32(body))) + body, payload]


def decode_state(data: Buffer, link: str = "a link") -> SlotState:
    """Return the state in `data`, its payload a view of it.

    Raises:
        CorruptPacket: the bytes are not those that were sent.
        InvalidPacket: they are, and say what cannot be.
    """
    view = memoryview(data).cast("B")
    if view.nbytes < _CRC.size + _HEADER.size or _CRC.unpack_from(view) != (_MAGIC, zlib.crc32(view[_CRC.size :])):
        raise CorruptPacket(link)
    slot, epoch, length, rows, ids, is_pending, request_id, start, dtype, first, end, size = _HEADER.unpack_from(
        view, _CRC.size
    )
    at = _CRC.size + _HEADER.size
    # Sizes are compared with the bytes at hand before anything is unpacked, so a lie costs no memory.
    behind = at + 8 * rows + 4 * ids
    behind += -behind % _ALIGNMENT
    if behind + size != view.nbytes or rows < start or dtype not in set(PayloadType):
        raise InvalidPacket("An exported slot says that it has another size than it has.")
    return SlotState(
        slot=slot,
        epoch=epoch,
        length=length,
        first_layer=first,
        end_layer=end,
        dtype=PayloadType(dtype),
        hashes=struct.unpack_from(f"<{rows}Q", view, at),
        token_ids=struct.unpack_from(f"<{ids}I", view, at + 8 * rows),
        pending=PendingRows(request_id, start, rows - start) if is_pending else None,
        payload=view[behind:],
    )
