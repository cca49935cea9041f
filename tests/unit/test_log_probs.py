"""Log-probabilities of rows: torch's own, the same bits in any company, the likeliest tokens in the picks' order."""

from __future__ import annotations

import pytest
import torch

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import SamplingParams, SessionParams, TokenLogProb
from specsplit.limits import MAX_TOP_LOGPROBS
from specsplit.sampling.log_probs import token_log_probs
from specsplit.sampling.processors import bias_row
from specsplit.sampling.sampler import Sampler


def random_rows(num_rows: int, vocab_size: int) -> torch.Tensor:
    return 4 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


@pytest.mark.parametrize("vocab_size", [3, 257, 70_001])
@pytest.mark.parametrize("top_logprobs", [0, 4, MAX_TOP_LOGPROBS])
def test_values_are_those_of_float64_and_of_the_row_alone(vocab_size: int, top_logprobs: int) -> None:
    logits = random_rows(6, vocab_size)
    token_ids = [row % vocab_size for row in range(6)]
    bias = bias_row(SamplingParams(logit_bias=((1, 30.0), (2, -1e4))), vocab_size)
    assert bias is not None
    found = token_log_probs(logits, token_ids, bias, top_logprobs)
    exact = torch.log_softmax(logits.double() + bias, -1)
    for row, (token_id, token) in enumerate(zip(token_ids, found, strict=True)):
        assert token.log_prob == pytest.approx(exact[row, token_id].item(), abs=1e-5, rel=1e-6)
        values, ids = exact[row].sort(descending=True)
        assert [token_id for token_id, _ in token.top] == ids[:top_logprobs].tolist()
        assert [value for _, value in token.top] == pytest.approx(values[:top_logprobs].tolist(), abs=1e-5, rel=1e-6)
    for rows in (slice(0, 1), slice(2, 5), slice(5, 6)):
        assert token_log_probs(logits[rows], token_ids[rows], bias, top_logprobs) == found[rows]


def test_the_lower_of_equals_comes_first_and_masked_tokens_are_left_out() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -torch.inf, 2.0]])
    (token,) = token_log_probs(logits, [0], None, 20)
    assert [token_id for token_id, _ in token.top] == [1, 2, 4, 0]
    assert token.top[-1] == (0, token.log_prob)


def test_bias_counts_and_penalties_temperature_and_cuts_do_not() -> None:
    sampling = SamplingParams(temperature=0.3, top_k=1, min_p=0.5, repetition_penalty=9, logit_bias=((2, 3.0),))
    sampler = Sampler(SessionParams(sampling, top_logprobs=2), 50, torch.device("cpu"))
    logits = random_rows(4, 50)
    # Node 1 was accepted below the root, node 2 below it: rows 0, 2 and 3 emit.
    found = sampler.log_probs(logits, [1, 2], [7, 8, 2])
    assert found == token_log_probs(logits[[0, 2, 3]], [7, 8, 2], bias_row(sampling, 50), 2)


def test_without_being_asked_nothing_is_computed() -> None:
    sampler = Sampler(SessionParams(), 50, torch.device("cpu"))
    assert sampler.log_probs(torch.empty(0), [5], [7, 8]) == ()
    own = Sampler(SessionParams(top_logprobs=0), 50, torch.device("cpu")).log_probs(torch.zeros(1, 50), [], [7])
    assert own == (TokenLogProb(own[0].log_prob),)


@pytest.mark.parametrize("count", [-1, MAX_TOP_LOGPROBS + 1])
def test_as_many_as_openai_allows_may_be_asked_for(count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}"):
        SessionParams(top_logprobs=count)
