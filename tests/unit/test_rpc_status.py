"""The error tree and gRPC statuses: total both ways, by code and typed detail, never by words."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import status_pb2

from specsplit.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoFreeSlot,
    Overloaded,
    PeerMismatch,
    SlotBehind,
    SpecSplitError,
    StageBehind,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.rpc.pb import common_pb2
from specsplit.rpc.status import STATUS, error_of, error_said, of_call, status_of

PEER = "The target at 127.0.0.1:1"


def tree_of(error: type[SpecSplitError]) -> list[type[SpecSplitError]]:
    """Return the error and everything below it, our package's own."""
    below = [kind for child in error.__subclasses__() for kind in tree_of(child)]
    return [error, *below] if error.__module__ == "specsplit.core.errors" else below


TREE = tree_of(SpecSplitError)


def made(kind: type[SpecSplitError]) -> SpecSplitError:
    if issubclass(kind, SlotBehind):
        return kind(17, is_preempted=True)
    if issubclass(kind, StageBehind):
        return kind({0: 0, 3: 17})
    if issubclass(kind, Overloaded):
        return kind("Full.", 0.75)
    if issubclass(kind, InvalidRequest):
        return kind("Too hot, say: 100 °C.", param="temperature")
    return kind("A sentence.")


def received(status: grpc.Status) -> grpc.aio.AioRpcError:
    """Return what a client gets of the status."""
    metadata = grpc.aio.Metadata(*(status.trailing_metadata or ()))
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, details=status.details)


def foreign(code: grpc.StatusCode, details: str = "", *metadata: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details=details)


def test_every_error_of_the_tree_has_its_status():
    assert set(TREE) == set(STATUS)
    assert len({kind.__name__ for kind in STATUS}) == len(STATUS)
    assert grpc.StatusCode.OK not in STATUS.values()


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_comes_back_as_itself(kind: type[SpecSplitError]):
    sent = made(kind)
    ended, said = (
        error_of(received(of_call(status_of(sent))), PEER),
        error_said(status_of(sent).SerializeToString(), PEER),
    )
    for back in (ended, said):
        assert (type(back), str(back)) == (kind, str(sent))
        assert getattr(back, "param", None) == getattr(sent, "param", None)
        assert getattr(back, "have", None) == getattr(sent, "have", None)
        assert getattr(back, "link", None) == getattr(sent, "link", None)


def test_an_error_below_a_known_one_travels_as_that_one():
    class TooManyBiases(InvalidRequest):
        pass

    back = error_of(received(of_call(status_of(TooManyBiases("Too many.", param="logit_bias")))), PEER)
    assert (type(back), str(back)) == (InvalidRequest, "Too many.")


def test_what_is_outside_the_tree_leaks_nothing():
    status = of_call(status_of(RuntimeError("/secret/path of user 7")))
    assert status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in repr(status)
    assert isinstance(error_of(received(status), PEER), WorkerFailed)


EXPECTED = {
    grpc.StatusCode.UNAVAILABLE: WorkerUnreachable,
    grpc.StatusCode.CANCELLED: WorkerUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: PeerMismatch,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
}


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
@pytest.mark.parametrize("words", ["", "SlotBehind: have 3, Connection refused, StaleRound, deadline"])
def test_a_foreign_status_is_judged_by_its_code_alone(code: grpc.StatusCode, words: str):
    error = error_of(foreign(code, words), PEER)
    assert type(error) is EXPECTED.get(code, WorkerFailed)
    assert PEER in str(error)


@pytest.mark.parametrize(
    "detail",
    [
        b"",
        b"\xff\xff\xff",
        status_pb2.Status(code=1).SerializeToString(),
        status_pb2.Status(code=9, message="other words").SerializeToString(),
        status_pb2.Status(code=9, message="words").SerializeToString(),
        status_pb2.Status(
            code=9,
            message="words",
            details=[{"type_url": "type.googleapis.com/specsplit.v1.ErrorDetail", "value": b"\xff"}],
        ).SerializeToString(),
        status_pb2.Status(
            code=9,
            message="words",
            details=[{"type_url": "type.googleapis.com/specsplit.v1.ErrorDetail", "value": b"\n\1X"}],
        ).SerializeToString(),
    ],
)
def test_a_detail_that_is_none_of_ours_changes_nothing(detail: bytes):
    failure = foreign(grpc.StatusCode.FAILED_PRECONDITION, "words", ("grpc-status-details-bin", detail))
    assert type(error_of(failure, PEER)) is WorkerFailed


@pytest.mark.parametrize("has_retry", [False, True])
def test_a_refusal_of_a_later_release_may_be_tried_again(has_retry: bool):
    status = status_of(Overloaded("No room for adapters.", 0.75) if has_retry else NoFreeSlot("No room for adapters."))
    status.details[0].Pack(common_pb2.ErrorDetail(kind="NoAdapterRoom"))
    for back in (error_of(received(of_call(status)), PEER), error_said(status.SerializeToString(), PEER)):
        assert (type(back), str(back)) == (Overloaded if has_retry else NoFreeSlot, "No room for adapters.")
        assert getattr(back, "retry_after_s", 0.75) == 0.75


@pytest.mark.parametrize("data", [b"\xff", status_pb2.Status(code=99).SerializeToString()])
def test_a_status_that_makes_no_sense_is_a_failed_worker(data: bytes):
    assert type(error_said(data, PEER)) is WorkerFailed


@pytest.mark.parametrize("message", ["x" * 100_000, "€" * 5000, "half a character \ud800"])
def test_a_sentence_of_any_length_fits_the_metadata(message: str):
    status = of_call(status_of(InvalidRequest(message)))
    assert len(status.details.encode()) <= 1000
    assert len(error_of(received(status), PEER).args[0]) >= 18
