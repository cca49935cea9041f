"""A commit with nodes that the target found itself, on the wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import ROOT, Proposal, Timings, Verdict
from specsplit.limits import FIRST_FOUND
from specsplit.rpc import calls
from specsplit.rpc.pb import target_pb2


def found_commit() -> Verdict:
    """Return a commit that went through a node of the client and two that the target found."""
    found = Proposal(FIRST_FOUND, 30, (4, 5, 6), (7, FIRST_FOUND, ROOT), (-0.5, -0.25, -1.0))
    accepted, verified = (7, FIRST_FOUND, FIRST_FOUND + 1), (7, 9, FIRST_FOUND, FIRST_FOUND + 1, FIRST_FOUND + 2)
    return Verdict(accepted, (3, 4, 5, 8), 34, verified, found=found)


def test_a_commit_with_found_nodes_travels_whole() -> None:
    sent = found_commit()
    message = target_pb2.VerifyStreamResponse.FromString(calls.encode_commit(sent).SerializeToString())
    assert list(message.commit.accepted) == [7]
    assert list(message.commit.verified) == [7, 9]
    assert calls.decode_commit(message.commit, Timings(), 10) == sent


def _number_elsewhere(commit: target_pb2.Commit) -> None:
    commit.found.first_node = 12


def _hang_on_nothing(commit: target_pb2.Commit) -> None:
    commit.found.parents[0] = FIRST_FOUND - 8


def _accept_what_is_not_there(commit: target_pb2.Commit) -> None:
    commit.token_ids.insert(1, 9)


def _name_a_token_outside(commit: target_pb2.Commit) -> None:
    commit.found.token_ids[2] = 10


@pytest.mark.parametrize(
    "damage", [_number_elsewhere, _hang_on_nothing, _accept_what_is_not_there, _name_a_token_outside]
)
def test_a_commit_whose_found_nodes_cannot_be_is_refused(damage: Callable[[target_pb2.Commit], None]) -> None:
    commit = calls.encode_commit(found_commit()).commit
    damage(commit)
    with pytest.raises(InvalidRequest):
        calls.decode_commit(commit, Timings(), 10)
