"""Identities and slots of stages as messages and back; knows nothing of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from specsplit.limits import MAX_NAME
from specsplit.rpc.codec import decode_exactness, decode_numerics, require
from specsplit.rpc.pb import stage_pb2
from specsplit.rpc.words import clean_name
from specsplit.stages.identity import StageIdentity
from specsplit.stages.packet import Buffer
from specsplit.stages.slot_state import SlotState, decode_state, encode_state

T = TypeVar("T")
_PIECE_BYTES = 1 << 20
_LARGE_BYTES = 1 << 20
"""A larger slot is hashed in a thread, since that takes about a millisecond per MiB."""
_WORDS = ("model", "dtype", "config_hash", "weights_hash", "hidden_dtype", "model_revision")
_FIELDS = (
    "model",
    "num_layers",
    "start",
    "end",
    "has_embedding",
    "has_head",
    "hidden_size",
    "vocab_size",
    "dtype",
    "context",
    "node_limit",
    "num_slots",
    "slot_bytes",
    "config_hash",
    "weights_hash",
    "protocol_version",
    "kv_bytes_per_token",
    "kv_rows",
    "hidden_dtype",
    "model_revision",
)


def encode_identity(identity: StageIdentity) -> stage_pb2.StageIdentity:
    """Return the message of `identity`."""
    fields = {name: getattr(identity, name) for name in _FIELDS}
    return stage_pb2.StageIdentity(**fields, exactness=identity.exactness, numerics=identity.numerics)


def decode_identity(message: stage_pb2.StageIdentity) -> StageIdentity:
    """Return the identity that a message holds.

    Raises:
        InvalidRequest: it says what cannot be.
    """
    # Every field has the same name in the record and in the message, so one table serves both ways.
    fields: dict[str, Any] = {name: getattr(message, name) for name in _FIELDS}
    for name in _WORDS:
        require(len(fields[name]) <= MAX_NAME, name, f"A {name} of {len(fields[name])} characters is no name.")
        fields[name] = clean_name(fields[name])
    identity = StageIdentity(
        **fields,
        exactness=decode_exactness(message.exactness),
        numerics=decode_numerics(message.numerics),
    )
    require(identity.start < identity.end <= identity.num_layers, "layers", f"{identity.layers} is no range of layers.")
    return identity


async def encode_slot(state: SlotState) -> list[Buffer]:
    """Return a slot's bytes, as `encode_state` does; a large one does not hold up the event loop."""
    return await _unblocking(memoryview(state.payload).nbytes, lambda: encode_state(state))


async def decode_slot(content: Buffer, link: str) -> SlotState:
    """Return the slot in `content` as `decode_state` does, and raise as that; a large one does not hold up the loop."""
    return await _unblocking(memoryview(content).nbytes, lambda: decode_state(content, link))


async def _unblocking(num_bytes: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if num_bytes > _LARGE_BYTES else work()


def slot_pieces(buffers: Sequence[Buffer]) -> Iterator[bytes]:
    """Yield bytes in pieces that are messages each."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield stage_pb2.SlotPiece(data=bytes(view[start : start + _PIECE_BYTES])).SerializeToString()
