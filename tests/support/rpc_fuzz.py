"""Messages that nobody meant to send: bytes at random, bytes changed, cut and doubled, and fields with wild values."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from specsplit.core.types import Budget, Proposal, SamplingParams, SessionParams, Timings, Turn, Verdict
from specsplit.rpc import calls
from specsplit.rpc.pb import common_pb2, draft_pb2, target_pb2

_SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, logit_bias=((3, -2.0), (4, 1.5)))
_OPENING = SessionParams(_SAMPLING, seed=1 << 63, choice=2, prompt_length=4, eos_ids=(9, 300), max_tokens=64)
_TURNS = (
    Turn("fuzzed", 1, 1, 0, 0, (5, 9, 2, 7), _OPENING),
    Turn("fuzzed", 2, 70000, 4, 0xDEADBEEF, (5,)),
)
_TREES = (
    Proposal(1, 3),
    Proposal(1, 3, (1, 2, 3, 200), (0, 1, 1, 3), (-0.5, -1.0, 0.0, -9.0)),
    Proposal(500, 70000, (1, 70000), (0, 20), (-0.5, -1.0)),
)

REQUESTS: dict[str, list[Message]] = {
    "GenerateDrafts": [calls.encode_drafts_request(turn, 7, Budget(8, 4, 3)) for turn in _TURNS],
    "VerifyDrafts": [calls.encode_verify_request(turn, tree) for turn in _TURNS for tree in _TREES],
    "Score": [
        calls.encode_score_request((5, 9, 2), (7, 300), ()),
        calls.encode_score_request((5,), (7,), ((3, 1.0), (4, -1.0))),
    ],
    "GetTokenizer": [calls.encode_get_tokenizer("0123456789abcdef")],
    "EndSession": [calls.encode_end_session("fuzzed")],
    "Ping": [common_pb2.PingRequest()],
}
"""Valid requests by the name of their method."""

RESPONSES: list[Message] = [
    draft_pb2.GenerateDraftsResponse(tree={"first_node": 3, "token_ids": [4], "parents": [2], "log_probs": b"\5"}),
    calls.encode_verdict(Verdict((1, 3), (1, 3, 7), 9, (1, 3), Timings(1.0, 2.0, 3.0)), _TREES[1]),
    target_pb2.ScoreResponse(log_probs=[-1.0, -2.0]),
    target_pb2.GetTokenizerResponse(hash="ab", eos_ids=[1], size=3),
    common_pb2.PingResponse(identity={"role": "ROLE_DRAFT", "model": "m"}, time_us=7),
]


def mangled(message: Message, rng: random.Random) -> bytes:
    """Return `message` on the wire after a few accidents, to its fields or to its bytes.

    It never has a crc, since a wrong one ends a call before anything else is looked at.
    """
    while _has_crc(type(message), data := _mangled(message, rng)):
        pass
    return data


def _has_crc(kind: type[Message], data: bytes) -> bool:
    if "crc" not in kind.DESCRIPTOR.fields_by_name:
        return False
    try:
        return kind.FromString(data).HasField("crc")
    except DecodeError:
        return data[-5:-4] == b"\x7d"


def _mangled(message: Message, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        scrambled = type(message)()
        scrambled.CopyFrom(message)
        for _ in range(rng.randint(1, 3)):
            _scramble(scrambled, rng)
        return scrambled.SerializeToString()
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(60))
    data = message.SerializeToString()
    mangled = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(mangled) + 1)
        accident = rng.randrange(5)
        if accident == 0:
            mangled[at : at + 1] = rng.randbytes(1)
        elif accident == 1:
            del mangled[at:]
        elif accident == 2:
            mangled[at:at] = mangled[at : at + rng.randrange(1, 30)]
        elif accident == 3:
            mangled[at : at + 1] = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80"))
        else:
            mangled += data[at:]
    return bytes(mangled)


_WILD = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 3, 7, 63, 127, 128, 4096, 4097, 1 << 20, 1 << 31, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 1 << 63, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, math.inf, -math.inf, math.nan),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, 1.0, -1.0, 1e38, math.inf, -math.inf, math.nan),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, -1, (1 << 31) - 1),
}


def _scramble(message: Any, rng: random.Random) -> None:
    """Give one field, at any depth, a wild value, or take it away."""
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[_wild_word(rng)] = _wild_word(rng)
    elif field.is_repeated:
        values = getattr(message, field.name)
        for _ in range(rng.choice((1, 1, 2, 5, 70))):
            if field.message_type is not None:
                _scramble(values.add(), rng)
            else:
                values.insert(rng.randrange(len(values) + 1), _wild(field, rng))
        del values[: rng.choice((0, 0, 1, 5))]
    elif field.message_type is not None:
        _scramble(getattr(message, field.name), rng)
    else:
        setattr(message, field.name, _wild(field, rng))


def _wild(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return _wild_word(rng)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 4, 100)))
    return rng.choice(_WILD[field.cpp_type])


def _wild_word(rng: random.Random) -> str:
    return rng.choice(("", "fuzzed", "x" * 64, "x" * 65, "\0", "../x", "\U0001f600"))
