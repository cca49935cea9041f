"""Lies about every field of a service's answers: numbers out of range, lists of any length, words that drive terminals.

Knows messages by their descriptors alone, so a new field is lied about, too.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from specsplit.rpc.checksum import with_crc

WORDS = "\x1b]0;owned\x07\x1b[2J\r\nError: all is well\u202e\u200b"
MANY = 100_000
"""Values of a list that has too many."""
_Kind = FieldDescriptor
_INTEGERS = (_Kind.CPPTYPE_UINT32, _Kind.CPPTYPE_UINT64)
_FLOATS = (_Kind.CPPTYPE_FLOAT, _Kind.CPPTYPE_DOUBLE)


@dataclass(frozen=True)
class Lie:
    """One way to change one field of the messages of one method."""

    method: str
    kind: type[Message]
    path: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.method}: {'.'.join(self.path)} {self.what}"

    def told(self, data: bytes) -> bytes:
        """Return a message with the lie in it; one that cannot have it, since another body is set, as it is."""
        message = self.kind.FromString(data)
        inner: Any = message
        for name in self.path[:-1]:
            field = inner.DESCRIPTOR.fields_by_name[name]
            if field.containing_oneof is not None and not inner.HasField(name):
                return data
            inner = getattr(inner, name)
            if field.is_repeated:
                inner = inner[0] if inner else inner.add()
        _change(inner, self.path[-1], self.what)
        # The liar's crc is right, unless it is what the lie is about.
        if self.path[-1] == "crc":
            return message.SerializeToString()
        if "crc" in message.DESCRIPTOR.fields_by_name:
            message.ClearField("crc")
        return with_crc(message)


def lies_about(method: str, kind: type[Message]) -> list[Lie]:
    """Return every lie about every field of a message, those within it included."""
    return [
        Lie(method, kind, path, what)
        for path, field in _fields_of(cast(Any, kind).DESCRIPTOR, ())
        for what in _whats(field)
    ]


def _fields_of(kind: Descriptor, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldDescriptor]]:
    for field in kind.fields:
        path = (*above, field.name)
        yield path, field
        if field.message_type is not None:
            yield from _fields_of(field.message_type, path)


def _whats(field: FieldDescriptor) -> tuple[str, ...]:
    if field.is_repeated:
        return ("absent", "twice", "backwards", "many", *(() if field.message_type else _whats_of_one(field)))
    return ("absent", "bare") if field.message_type is not None else _whats_of_one(field)


def _whats_of_one(field: FieldDescriptor) -> tuple[str, ...]:
    if field.cpp_type in _INTEGERS:
        return "zero", "one more", "most"
    if field.cpp_type in _FLOATS:
        return "not a number", "infinite", "negative"
    if field.cpp_type == _Kind.CPPTYPE_STRING:
        return "empty", "escapes", "long"
    return ("another",)


def _change(message: Any, name: str, what: str) -> None:
    field: FieldDescriptor = message.DESCRIPTOR.fields_by_name[name]
    if what in ("absent", "bare"):
        message.ClearField(name)
        if what == "bare":
            getattr(message, name).SetInParent()
    elif field.is_repeated:
        _change_list(getattr(message, name), field, what)
    else:
        setattr(message, name, _value(field, what, getattr(message, name)))


def _change_list(values: Any, field: FieldDescriptor, what: str) -> None:
    if what in ("twice", "backwards", "many"):
        found = list(values)
        if what == "many":
            found = (found or [_first_of(field, values)]) * MANY
        del values[:]
        values.extend(found[::-1] if what == "backwards" else found * 2 if what == "twice" else found)
    elif values:
        values[0] = _value(field, what, values[0])
    else:
        values.append(_value(field, what, 0))


def _first_of(field: FieldDescriptor, values: Any) -> Any:
    return values.add() if field.message_type is not None else _value(field, _whats_of_one(field)[0], 0)


def _value(field: FieldDescriptor, what: str, true: Any) -> Any:
    match what:
        case "zero" | "one more" | "most":
            most = (1 << (32 if field.cpp_type == _Kind.CPPTYPE_UINT32 else 64)) - 1
            return {"zero": 0, "one more": min(true + 1, most), "most": most}[what]
        case "not a number" | "infinite" | "negative":
            return {"not a number": math.nan, "infinite": math.inf, "negative": -1e30}[what]
        case "empty" | "escapes" | "long":
            word = {"empty": "", "escapes": WORDS, "long": "x" * MANY}[what]
            return word if field.type == _Kind.TYPE_STRING else word.encode()
        case _:
            return not true if field.cpp_type == _Kind.CPPTYPE_BOOL else 99


class LyingService:
    """A service of ours that tells a lie in every answer of one method, or the truth while `lie` is None.

    `rounds` is the method that the messages of its stream of rounds stand for.
    """

    def __init__(self, inner: Any, rounds: str = "", lie: Lie | None = None) -> None:
        self._inner, self._rounds, self.lie = inner, rounds, lie
        self.num_told = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _said(self, method: str, data: bytes) -> bytes:
        if self.lie is None or self.lie.method != method:
            return data
        told = self.lie.told(data)
        self.num_told += told != data
        return told

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the calls of the inner service, whose answers pass through the lie."""
        outer, handlers = self, self._inner.handlers()

        class Handlers(grpc.GenericRpcHandler):
            def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
                found = handlers.service(handler_call_details)
                return None if found is None else outer.around(found, handler_call_details.method.rpartition("/")[2])

        return Handlers()

    def around(self, found: Any, method: str) -> Any:
        """Return a handler of the method that calls `found` and passes its answers through the lie."""
        make = cast(Any, grpc)
        if method == "Rounds":
            # Our server hands each message of such a stream to the handler by itself.
            async def answer_round(data: bytes) -> bytes:
                return self._said(self._rounds, await found.stream_stream(data))

            return make.stream_stream_rpc_method_handler(answer_round)
        if not found.response_streaming:

            async def answer(data: bytes, context: Any) -> bytes:
                return self._said(method, await found.unary_unary(data, context))

            return make.unary_unary_rpc_method_handler(answer)
        served: Callable[..., AsyncGenerator[bytes]] = found.stream_stream or found.unary_stream

        async def answer_all(requests: Any, context: Any) -> AsyncGenerator[bytes]:
            async for data in served(requests, context):
                yield self._said(method, data)

        kind = "stream" if found.request_streaming else "unary"
        return getattr(make, f"{kind}_stream_rpc_method_handler")(answer_all)
