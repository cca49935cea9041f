"""Identities and slots of stages as messages and back; knows nothing of calls."""

from __future__ import annotations

from collections.abc import Iterator

from specsplit.core.slot_state import SlotState, encode_state
from specsplit.core.stage_identity import StageIdentity
from specsplit.rpc.codec import require
from specsplit.rpc.pb import stage_pb2

_PIECE_BYTES = 1 << 20
_MAX_TEXT = 256
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
    "tokenizer_hash",
    "protocol_version",
)


def encode_identity(identity: StageIdentity) -> stage_pb2.StageIdentity:
    """Return the message of `identity`."""
    return stage_pb2.StageIdentity(**{name: getattr(identity, name) for name in _FIELDS})


def decode_identity(message: stage_pb2.StageIdentity) -> StageIdentity:
    """Return the identity that a message holds.

    Raises:
        InvalidRequest: it says what cannot be.
    """
    identity = StageIdentity(**{name: getattr(message, name) for name in _FIELDS})
    require(identity.start < identity.end <= identity.num_layers, "layers", f"{identity.layers} is no range of layers.")
    for name in ("model", "dtype", "config_hash", "weights_hash", "tokenizer_hash"):
        require(len(getattr(identity, name)) <= _MAX_TEXT, name, f"{name} is longer than {_MAX_TEXT} characters.")
    return identity


def state_pieces(state: SlotState) -> Iterator[bytes]:
    """Give a slot's bytes in pieces that are messages each."""
    for buffer in encode_state(state):
        view = memoryview(buffer).cast("B")
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield stage_pb2.SlotPiece(data=bytes(view[start : start + _PIECE_BYTES])).SerializeToString()
