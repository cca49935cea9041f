"""Log-probabilities in the messages of a target: what does not belong to its tokens is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import Proposal, Scores, Timings, TokenLogProb
from specsplit.limits import MAX_MESSAGE_BYTES
from specsplit.rpc import calls
from specsplit.rpc.pb import target_pb2

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("log_probs", "top"),
    [
        ([-1.0, -2.0], []),
        ([], [{"token_ids": [5], "log_probs": [-1.0]}]),
        ([-INFINITY], []),
        ([-1.0], [{"token_ids": [5], "log_probs": [NAN]}]),
        ([-1.0], [{"token_ids": [5, 6], "log_probs": [-1.0]}]),
        ([-1.0], [{"token_ids": range(21), "log_probs": [-1.0] * 21}]),
        ([-1.0], [{"token_ids": [5], "log_probs": [-1.0]}] * 2),
    ],
)
def test_log_probabilities_that_are_not_those_of_the_tokens_are_refused(log_probs: list[float], top: Any):
    message = target_pb2.VerifyDraftsResponse(token_ids=[7], log_probs=log_probs, top_log_probs=top)
    with pytest.raises(InvalidRequest):
        calls.decode_verdict(message, Proposal(1, 0), Timings())
    commit = target_pb2.Commit(token_ids=[7], log_probs=log_probs, top_log_probs=top)
    with pytest.raises(InvalidRequest):
        calls.decode_commit(commit, Timings())


def test_a_target_that_does_not_know_of_likeliest_tokens_is_found_out():
    old = target_pb2.ScoreResponse(log_probs=[-1.0, -2.0])
    with pytest.raises(InvalidRequest, match="lacks the likeliest tokens"):
        calls.decode_scores(old, 2, Timings(), top_logprobs=1)


@pytest.mark.parametrize("top_logprobs", [18, 20])
def test_a_score_is_refused_if_its_answer_fits_no_message(top_logprobs: int):
    likeliest = tuple(((1 << 21) - 1 - rank, -1.0) for rank in range(top_logprobs))
    scores = Scores((TokenLogProb(-1.0, likeliest),) * 1000, Timings())
    most = 1000 * MAX_MESSAGE_BYTES // calls.encode_scores(scores).ByteSize()
    request = target_pb2.ScoreRequest(prompt=[1], scored=[1] * (most - most // 1000), top_logprobs=top_logprobs)
    assert calls.decode_score_request(request)[3] == top_logprobs
    request.scored.extend([1] * (most // 1000 + 1))
    with pytest.raises(InvalidRequest, match="score fewer at a time"):
        calls.decode_score_request(request)
