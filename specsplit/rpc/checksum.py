"""The crc at the end of messages whose damage would change a text: field 15, after all others. Knows no message.

TCP's own checksum lets one damaged packet of some 65,000 pass, and a link in plaintext has nothing else.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

from google.protobuf.message import Message

from specsplit.core.errors import InvalidRequest, WorkerFailed
from specsplit.rpc.calls import parse

_TAG = b"\x7d"
"""Field 15 of 32 fixed bits."""
_CRC_BYTES = 5
M = TypeVar("M", bound=Message)


def with_crc(message: Message) -> bytes:
    """Return the bytes of `message`, with their crc if its kind has one."""
    data = message.SerializeToString()
    if "crc" not in message.DESCRIPTOR.fields_by_name:
        return data
    return data + _TAG + zlib.crc32(data).to_bytes(4, "little")


def parse_checked(kind: type[M], data: bytes) -> M:
    """Return the message of `kind` in `data`; one without a crc comes from an earlier release, and is not checked.

    Raises:
        InvalidRequest: the bytes are no such message.
        WorkerFailed: they are not those that were sent, so that the same call may be made again.
    """
    if "crc" not in kind.DESCRIPTOR.fields_by_name:
        return parse(kind, data)
    end = len(data) - _CRC_BYTES
    if end >= 0 and zlib.crc32(memoryview(data)[:end]) == int.from_bytes(data[end + 1 :], "little"):
        return parse(kind, data[:end])
    try:
        message = parse(kind, data)
    except InvalidRequest as error:
        if data[-_CRC_BYTES:-4] != _TAG:
            raise
        raise _damaged(kind) from error
    # Without a crc the tag's byte may stand there by chance, so the message has to say itself that it has one.
    if message.HasField("crc"):
        raise _damaged(kind)
    return message


def _damaged(kind: type[Message]) -> WorkerFailed:
    return WorkerFailed(f"A {kind.__name__} was damaged on its way; its crc is wrong.")
