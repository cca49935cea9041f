"""Stage packets as bytes and back: a header, the sessions, padding, then the payload as it lies (docs/protocol.md, 9).

A crc32 over header and payload tells damage on the way (CorruptPacket: nothing in it can be trusted, only the link is
known) from a peer that writes nonsense (InvalidPacket). Nothing is allocated for what a packet merely claims.

header   magic, version, request_id, session, epoch, step_kind, batch, seq, hidden_size, dtype, layout, token_index,
         stage_from, stage_to, body_bytes, payload_bytes, crc32; session, epoch, token_index are the first session's
session  slot, epoch, start, base_hash, counts and flags; then the prefix hashes and whatever the flags name
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from specsplit.core.errors import CorruptPacket, InvalidPacket, InvalidRequest
from specsplit.core.types import SamplingParams, SessionParams, TokenLogProb
from specsplit.limits import MAX_TOP_LOGPROBS
from specsplit.stages.packet import Buffer, HeadRequest, KeepList, Layout, Packet, PacketSession, PayloadType, StepKind

_MAGIC, _VERSION, _TOP_VERSION = b"SSPK", 1, 2
# The second version has the parts that log-probabilities of picks and likeliest tokens need, and packets without them
# have the first: a stage of an earlier release serves all others, and refuses these in one sentence.
_HEADER = struct.Struct("<4sHQIQBIIIBBIhhIQ")
_CRC = struct.Struct("<I")
_SESSION = struct.Struct("<IQIQIIB")
_KEEP = struct.Struct("<QI")
_PARAMS = struct.Struct("<ddIddddQQII")
_COUNT = struct.Struct("<I")
_BYTE = struct.Struct("<B")
_NUM_PARAMS = 64
_ALIGNMENT = 64
"""The payload begins at a multiple of it, so that tensors can lie right on a received message."""

# What a session has, as bits of its flags; plain numbers, since an enum's operators take a microsecond each.
_PARENTS, _KEEPS, _TOKEN_IDS, _ASKS, _PICKS, _LOG_PROBS, _ASKS_TOP, _TOP = 1, 2, 4, 8, 16, 32, 64, 128
_ITEM_BYTES = {code: struct.calcsize("<" + code) for code in "QHIidBf"}


def encode(packet: Packet) -> list[Buffer]:
    """Return the packet's bytes as buffers; the last one is its payload, not copied."""
    # [header | crc | sessions | zeros to a multiple of 64 | payload]; the crc covers all but itself.
    body = b"".join(_session(session) for session in packet.sessions)
    first = packet.sessions[0]
    payload = memoryview(packet.payload).cast("B")
    header = _HEADER.pack(
        _MAGIC,
        _TOP_VERSION if any(map(_has_top, packet.sessions)) else _VERSION,
        packet.request_id,
        first.slot,
        first.epoch,
        packet.step_kind,
        packet.batch,
        packet.seq,
        packet.hidden_size,
        packet.dtype,
        packet.layout,
        first.start,
        packet.stage_from,
        packet.stage_to,
        len(body),
        payload.nbytes,
    )
    body += bytes(_padding(len(header) + _CRC.size + len(body)))
    crc = zlib.crc32(payload, zlib.crc32(body, zlib.crc32(header)))
    return [header + _CRC.pack(crc) + body, payload]


def decode(data: Buffer, link: str = "a link", traces: tuple[str, ...] = ()) -> Packet:
    """Return the packet in `data`, its payload a view of it; `link` names where the bytes came from.

    `traces` came beside it.

    Raises:
        CorruptPacket: the bytes are not those that were sent.
        InvalidPacket: they are, and say what cannot be.
    """
    view = memoryview(data).cast("B")
    head = _HEADER.size + _CRC.size
    if view.nbytes < head or bytes(view[:4]) != _MAGIC:
        raise CorruptPacket(link)
    (crc,) = _CRC.unpack_from(view, _HEADER.size)
    # The crc comes before any parsing: behind a wrong one not even the request id can be trusted.
    if crc != zlib.crc32(view[head:], zlib.crc32(view[: _HEADER.size])):
        raise CorruptPacket(link)
    try:
        packet = _packet(view, head)
    except (struct.error, ValueError, OverflowError) as error:
        raise InvalidPacket(f"A stage packet cannot be read ({error}).") from error
    except InvalidRequest as error:
        raise InvalidPacket(f"A stage packet carries sampling parameters out of range: {error}") from error
    # A peer that counts its sessions otherwise has no traces: they are never worth a packet.
    return replace(packet, traces=traces) if len(traces) == packet.batch else packet


def _packet(view: memoryview, head: int) -> Packet:
    (
        _,
        version,
        request_id,
        slot,
        epoch,
        step_kind,
        batch,
        seq,
        hidden_size,
        dtype,
        layout,
        token_index,
        stage_from,
        stage_to,
        body_bytes,
        payload_bytes,
    ) = _HEADER.unpack_from(view)
    if version not in (_VERSION, _TOP_VERSION):
        raise InvalidPacket(f"A stage packet has version {version}; this process speaks {_VERSION} and {_TOP_VERSION}.")
    start = head + body_bytes + _padding(head + body_bytes)
    if start + payload_bytes != view.nbytes:
        raise InvalidPacket(f"A stage packet of {view.nbytes} bytes says that it has {start + payload_bytes}.")
    reader = _Reader(view[head : head + body_bytes])
    sessions: list[PacketSession] = []
    while not reader.is_at_end:
        sessions.append(reader.session())
    packet = Packet(
        request_id=request_id,
        step_kind=StepKind(step_kind),
        hidden_size=hidden_size,
        dtype=PayloadType(dtype),
        stage_from=stage_from,
        stage_to=stage_to,
        sessions=tuple(sessions),
        payload=view[start:],
        layout=Layout(layout),
    )
    # The header repeats the first session for tools that look at packets without parsing them.
    first = packet.sessions[0]
    if (slot, epoch, token_index, batch, seq) != (first.slot, first.epoch, first.start, packet.batch, packet.seq):
        raise InvalidPacket("The header of a stage packet contradicts what follows it.")
    return packet


def _padding(num_bytes: int) -> int:
    return -num_bytes % _ALIGNMENT


def _has_top(session: PacketSession) -> bool:
    """Return whether a session has parts of the second version."""
    request = session.head_request
    return (request is not None and request.params.top_logprobs is not None) or any(
        token.top for token in session.log_probs
    )


def _session(session: PacketSession) -> bytes:
    flags, parts = 0, [b"", _array("Q", session.hashes)]
    if session.parents is not None:
        flags |= _PARENTS
        # Parents travel as parent + 1, so that -1 (the row before `start`) fits an unsigned 16-bit number.
        parts.append(_array("H", [parent + 1 for parent in session.parents]))
    if (keep := session.keep) is not None:
        flags |= _KEEPS
        parts.append(_KEEP.pack(keep.request_id, len(keep.rows)) + _array("H", keep.rows))
    if session.token_ids:
        flags |= _TOKEN_IDS
        parts.append(_array("I", session.token_ids))
    if (head_request := session.head_request) is not None:
        flags |= _ASKS
        parts.append(_params(head_request.params) + _counted("I", head_request.scored))
        if head_request.params.top_logprobs is not None:
            flags |= _ASKS_TOP
            parts.append(_BYTE.pack(head_request.params.top_logprobs))
    if session.picks:
        flags |= _PICKS
        parts.append(_array("i", session.picks))
    if session.log_probs:
        flags |= _LOG_PROBS
        parts.append(_counted("d", [token.log_prob for token in session.log_probs]))
        if any(token.top for token in session.log_probs):
            flags |= _TOP
            parts += [_top(token) for token in session.log_probs]
    parts[0] = _SESSION.pack(
        session.slot,
        session.epoch,
        session.start,
        session.base_hash,
        session.num_tokens,
        session.num_logits,
        flags,
    )
    return b"".join(parts)


def _top(token: TokenLogProb) -> bytes:
    ids, values = [token_id for token_id, _ in token.top], [log_prob for _, log_prob in token.top]
    return _BYTE.pack(len(ids)) + _array("I", ids) + _array("f", values)


def _array(code: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def _counted(code: str, values: Sequence[float]) -> bytes:
    return _COUNT.pack(len(values)) + _array(code, values)


def _params(params: SessionParams) -> bytes:
    """Return the parameters that picks depend on; eos ids and the limit of tokens stay with the coordinator."""
    sampling = params.sampling
    biases = sampling.logit_bias
    fixed = _PARAMS.pack(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        params.seed,
        params.choice,
        params.prompt_length,
        len(biases),
    )
    return fixed + _array("I", [token for token, _ in biases]) + _array("d", [bias for _, bias in biases])


class _Reader:
    """Takes values from the front of the sessions' bytes; raises struct.error if they end too early."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    @property
    def is_at_end(self) -> bool:
        return self._at == self._view.nbytes

    def session(self) -> PacketSession:
        slot, epoch, start, base_hash, num_tokens, num_logits, has = self._struct(_SESSION)
        return PacketSession(
            slot,
            epoch,
            start,
            base_hash,
            hashes=self._array("Q", num_tokens),
            parents=tuple([above - 1 for above in self._array("H", num_tokens)]) if has & _PARENTS else None,
            keep=self._keep() if has & _KEEPS else None,
            token_ids=self._array("I", num_tokens) if has & _TOKEN_IDS else (),
            num_logits=num_logits,
            head_request=self._head_request(asks_top=bool(has & _ASKS_TOP)) if has & _ASKS else None,
            picks=self._array("i", num_logits) if has & _PICKS else (),
            log_probs=self._log_probs(has_top=bool(has & _TOP)) if has & _LOG_PROBS else (),
        )

    def _keep(self) -> KeepList:
        request_id, count = self._struct(_KEEP)
        return KeepList(request_id, self._array("H", count))

    def _head_request(self, *, asks_top: bool) -> HeadRequest:
        fixed = bytes(self._view[self._at : self._at + _PARAMS.size])
        num_biases = self._struct(_PARAMS)[-1]
        token_ids, values = self._array("I", num_biases), self._array("d", num_biases)
        # A session sends the same parameters with every step; those with biases would fill the memory of the cache.
        make = _params_in.__wrapped__ if num_biases else _params_in
        scored = self._counted("I")
        (top_logprobs,) = self._struct(_BYTE) if asks_top else (None,)
        return HeadRequest(make(fixed, tuple(zip(token_ids, values, strict=True)), top_logprobs), scored)

    def _log_probs(self, *, has_top: bool) -> tuple[TokenLogProb, ...]:
        values = self._counted("d")
        return tuple([TokenLogProb(value, self._top() if has_top else ()) for value in values])

    def _top(self) -> tuple[tuple[int, float], ...]:
        (count,) = self._struct(_BYTE)
        if count > MAX_TOP_LOGPROBS:
            raise InvalidPacket(f"A stage packet holds {count} likeliest tokens of a row.")
        return tuple(zip(self._array("I", count), self._array("f", count), strict=True))

    def _counted(self, code: str) -> tuple[Any, ...]:
        (count,) = self._struct(_COUNT)
        return self._array(code, count)

    def _array(self, code: str, count: int) -> tuple[Any, ...]:
        # The announced count is held against the bytes at hand before anything is allocated for it.
        size = _ITEM_BYTES[code] * count
        if size > self._view.nbytes - self._at:
            raise InvalidPacket(f"A stage packet ends within {count} values that it announces.")
        values = struct.unpack_from(f"<{count}{code}", self._view, self._at)
        self._at += size
        return values

    def _struct(self, of: struct.Struct) -> tuple[Any, ...]:
        values = of.unpack_from(self._view, self._at)
        self._at += of.size
        return values


@lru_cache(_NUM_PARAMS)
def _params_in(fixed: bytes, biases: tuple[tuple[int, float], ...], top_logprobs: int | None) -> SessionParams:
    *sampling, seed, choice, prompt_length, _ = _PARAMS.unpack(fixed)
    return SessionParams(
        sampling=SamplingParams(*sampling, logit_bias=biases),
        seed=seed,
        choice=choice,
        prompt_length=prompt_length,
        top_logprobs=top_logprobs,
    )
