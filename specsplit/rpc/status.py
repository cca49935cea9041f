"""Errors of the tree as gRPC statuses and back, by one table that is total both ways.

Code and typed detail (`ErrorDetail` inside google.rpc.Status) identify an error, never the words of its message. Knows
nothing of services or channels.
"""

from __future__ import annotations

from typing import Any, cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specsplit.core import errors
from specsplit.core.errors import (
    CorruptPacket,
    InvalidRequest,
    NoFreeSlot,
    Overloaded,
    SlotBehind,
    SpecSplitError,
    StageBehind,
    WorkerFailed,
)
from specsplit.limits import MAX_NAME
from specsplit.rpc.pb import common_pb2
from specsplit.rpc.words import clean_name, clean_words

STATUS: dict[type[SpecSplitError], grpc.StatusCode] = {
    errors.SpecSplitError: grpc.StatusCode.UNKNOWN,
    errors.UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidSettings: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.ModelDamaged: grpc.StatusCode.DATA_LOSS,
    errors.ModelUnsupported: grpc.StatusCode.FAILED_PRECONDITION,
    errors.VocabularyMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeviceUnavailable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NoFreeSlot: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.WorkerClosed: grpc.StatusCode.UNAVAILABLE,
    errors.MissingExtra: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LinkError: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.WorkerFailed: grpc.StatusCode.INTERNAL,
    errors.PeerMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.WrongResult: grpc.StatusCode.DATA_LOSS,
    errors.CorruptPacket: grpc.StatusCode.DATA_LOSS,
    errors.InvalidPacket: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SessionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SlotBehind: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StageBehind: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleRound: grpc.StatusCode.ABORTED,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
}
"""Every error of the tree and its status; the detail's `kind` is the class's name."""

_KINDS = {error.__name__: error for error in STATUS}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_MAX_MESSAGE_BYTES = 1000
"""Longest message: it travels twice, percent-encoded and in the detail, and peers take 8 KiB of metadata."""

_DEFAULT_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
"""How long a refused caller waits if the worker names no time, and at most."""

_FOREIGN: dict[grpc.StatusCode, tuple[type[SpecSplitError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (
        errors.WorkerUnreachable,
        "{peer} cannot be reached: it is not running, it hangs, or the connection was cut.",
    ),
    grpc.StatusCode.CANCELLED: (errors.WorkerUnreachable, "{peer} gave up the call."),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineExceeded, "{peer} gave no answer in time."),
    grpc.StatusCode.UNIMPLEMENTED: (
        errors.PeerMismatch,
        "{peer} serves no such service: a worker of another role, or none of specsplit's, is there; check the address.",
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        errors.InvalidRequest,
        "{peer} would have to take or give a message that is too large; ask for less at a time.",
    ),
}
"""Errors for a status without our detail, which comes from gRPC itself or from a process that is none of ours."""


def status_of(error: Exception) -> status_pb2.Status:
    """Return the status of `error`; an error outside the tree becomes WorkerFailed."""
    # Its text may hold paths or a prompt, which is for our own log only.
    if not isinstance(error, SpecSplitError):
        error = WorkerFailed("The worker failed on this request; its own log says more.")
    # A subclass that has no row of its own, as in tests, travels as the nearest class that has one.
    kind = next(kind for kind in type(error).__mro__ if kind in STATUS)
    detail = common_pb2.ErrorDetail(
        kind=kind.__name__,
        param=(error.param or "") if isinstance(error, InvalidRequest) else "",
        have=error.have if isinstance(error, SlotBehind) else 0,
        rows=error.have if isinstance(error, StageBehind) else {},
        link=error.link if isinstance(error, CorruptPacket) else "",
        preempted=isinstance(error, SlotBehind) and error.is_preempted,
        limit=error.limit if isinstance(error, Overloaded) else "",
    )
    details = [_packed(detail)]
    if isinstance(error, Overloaded):
        retry_info = error_details_pb2.RetryInfo()
        retry_info.retry_delay.FromMilliseconds(round(error.retry_after_s * 1e3))
        details.append(_packed(retry_info))
    return status_pb2.Status(code=STATUS[kind].value[0], message=_bounded(str(error)), details=details)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def of_call(status: status_pb2.Status) -> grpc.Status:
    """Return the status in the form in which a call ends."""
    return cast(grpc.Status, cast(Any, rpc_status).to_status(status))


def _bounded(message: str) -> str:
    return message.encode("utf-8", "replace")[:_MAX_MESSAGE_BYTES].decode("utf-8", "ignore")


def error_of(failure: grpc.aio.AioRpcError, peer: str) -> SpecSplitError:
    """Return the error of the tree for a failed call; `peer` names the worker at the start of a sentence."""
    try:
        rich: status_pb2.Status | None = cast(Any, rpc_status).from_call(failure)
    except (DecodeError, ValueError):
        # A peer that is none of ours may send anything.
        rich = None
    return _error(rich, failure.code(), failure.details() or "", peer)


def error_said(data: bytes, peer: str) -> SpecSplitError:
    """Return the error of the tree for a status within a message."""
    rich = status_pb2.Status()
    try:
        rich.ParseFromString(data)
        code = _CODES[rich.code]
    except (DecodeError, KeyError):
        return WorkerFailed(f"{peer} gave a malformed answer.")
    return _error(rich, code, rich.message, peer)


def _error(rich: status_pb2.Status | None, code: grpc.StatusCode, message: str, peer: str) -> SpecSplitError:
    detail, message, retry_after_s = _detail_of(rich), clean_words(message), _retry_after_s(rich)
    kind = _KINDS.get(detail.kind) if detail is not None else None
    if detail is not None and kind is None and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # A kind of a later release. The worker lacks something, so the request is no mistake and may be made again.
        kind = NoFreeSlot if retry_after_s is None else Overloaded
    if detail is None or kind is None:
        foreign, sentence = _FOREIGN.get(code, (errors.WorkerFailed, "{peer} failed on this request."))
        return foreign(sentence.format(peer=peer))
    if issubclass(kind, Overloaded):
        return kind(message, _DEFAULT_RETRY_S if retry_after_s is None else retry_after_s, clean_name(detail.limit))
    return _rebuilt(kind, detail, message, peer)


def _detail_of(rich: status_pb2.Status | None) -> common_pb2.ErrorDetail | None:
    detail = common_pb2.ErrorDetail()
    try:
        is_ours = rich is not None and any(packed.Unpack(detail) for packed in rich.details)
    except (DecodeError, ValueError):
        return None
    return detail if is_ours else None


def _retry_after_s(rich: status_pb2.Status | None) -> float | None:
    """Return the seconds of the status's RetryInfo; None without a sound one."""
    info = error_details_pb2.RetryInfo()
    try:
        if rich is not None and any(packed.Unpack(info) for packed in rich.details):
            return min(info.retry_delay.ToMilliseconds() / 1e3, _MOST_RETRY_S)
    except (DecodeError, ValueError):
        pass
    return None


def _rebuilt(kind: type[SpecSplitError], detail: common_pb2.ErrorDetail, message: str, peer: str) -> SpecSplitError:
    if issubclass(kind, SlotBehind):
        return kind(detail.have, peer, is_preempted=detail.preempted)
    if issubclass(kind, StageBehind):
        return kind(dict(sorted(detail.rows.items())))
    if issubclass(kind, CorruptPacket):
        return kind(clean_words(detail.link, MAX_NAME))
    if issubclass(kind, InvalidRequest):
        return kind(message, param=clean_words(detail.param, MAX_NAME) or None)
    return kind(message)
