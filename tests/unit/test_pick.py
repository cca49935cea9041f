"""Scores, picks and candidates: exact arithmetic, ties to the lower id, the same order for draft and target."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specsplit.core.types import quantised_log_probs
from specsplit.sampling.noise import gumbel_rows
from specsplit.sampling.pick import NOT_A_NUMBER, candidate_estimates, pick, picked_ids, scores
from specsplit.sampling.rows import as_array, tensor_over


def test_scores_are_divided_and_summed_in_float64() -> None:
    processed = torch.tensor([[0.1, -3.3, 7.7]])
    noise = torch.tensor([[1.0, 2.0**-16, -0.5]], dtype=torch.float64)
    result = scores(processed, 0.7, noise)
    assert result.dtype == torch.float64
    values = processed[0].tolist()
    expected = [(value - max(values)) / 0.7 + g for value, g in zip(values, noise[0].tolist(), strict=True)]
    assert result[0].tolist() == expected


@pytest.mark.parametrize("temperature", [1e-3, 1e-45, 1e-320])
def test_the_smallest_temperatures_pick_what_greedy_picks(temperature: float) -> None:
    processed = torch.arange(200.0).view(4, 50)
    assert pick(scores(processed, temperature, gumbel_rows(1, 0, 0, 4, 50))).tolist() == pick(processed).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_leave_their_input_alone(dtype: torch.dtype) -> None:
    processed = torch.randn(2, 5).to(dtype)
    before, noise = processed.clone(), gumbel_rows(1, 0, 0, 2, 5)
    noise_before = noise.clone()
    scores(processed, 0.5, noise)
    assert torch.equal(processed, before)
    assert torch.equal(noise, noise_before)


def test_greedy_scores_are_the_logits() -> None:
    processed = torch.randn(2, 5)
    assert scores(processed, 0, None) is processed


def test_a_cut_token_is_never_picked() -> None:
    processed = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for position in range(50):
        assert pick(scores(processed, 1.0, gumbel_rows(0, 0, position, 1, 3))).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [3, 33, 5000])
def test_ties_go_to_the_lower_id(dtype: torch.dtype, vocab: int) -> None:
    rows = torch.randint(0, 3, (20, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    expected = [row.index(max(row)) for row in rows.tolist()]
    picks = pick(rows)
    assert picks.dtype == torch.int64
    assert picks.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("levels", [3, 100_000])
def test_candidates_are_ranked_by_score_then_id(dtype: torch.dtype, k: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(k)
    rows = torch.randint(0, levels, (9, 40), generator=generator).to(dtype)
    before = rows.clone()
    ids, log_probs = candidate_estimates(rows, k)
    for row, found, estimates in zip(rows.tolist(), ids, log_probs, strict=True):
        ranked = sorted(range(40), key=lambda token: (-row[token], token))
        assert found == ranked[:k]
        best_few = torch.tensor([row[token] for token in ranked[: max(k + 1, 3)]], dtype=torch.float64)
        assert estimates == pytest.approx(best_few.log_softmax(-1)[:k].tolist(), abs=1e-12)
    assert [row[0] for row in ids] == pick(rows).tolist()
    assert torch.equal(rows, before)


def test_more_candidates_than_tokens_returns_them_all() -> None:
    ids, _ = candidate_estimates(torch.tensor([[1.0, 3.0, 2.0]]), 7)
    assert ids == [[1, 2, 0]]


def test_cut_tokens_and_what_is_no_number_are_no_candidates() -> None:
    nan, inf = float("nan"), torch.inf
    ids, log_probs = candidate_estimates(
        torch.tensor([[-inf, 2.0, -inf, 1.0], [0.0, nan, 1.0, 2.0], [0.0, 1.0, inf, 2.0]]), 4
    )
    assert ids == [[1, 3], [], []]
    assert log_probs[0] == pytest.approx([-0.31326, -1.31326], abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-45, 1e-307, 1e-320])
def test_hopeless_candidates_have_an_estimate_that_can_travel(temperature: float) -> None:
    processed = torch.tensor([[5.0, 0.0, -5.0]])
    _, log_probs = candidate_estimates(scores(processed, temperature, gumbel_rows(1, 0, 0, 1, 3)), 2)
    assert [quantised_log_probs([log_prob])[0] for log_prob in log_probs[0]] in ([0.0], [0.0, -255 / 16])


def test_an_estimate_knows_only_the_best_few() -> None:
    near, far = torch.zeros(1, 1000), torch.full((1, 1000), -50.0)
    near[0, :2], far[0, :2] = 5.0, 5.0
    assert candidate_estimates(near, 1)[1][0] == pytest.approx([-0.6965], abs=1e-3)
    assert candidate_estimates(far, 1)[1][0] == pytest.approx([-math.log(2)], abs=1e-3)


def test_scores_equal_in_float32_are_ranked_exactly_at_the_top() -> None:
    row = torch.tensor([[1.0, 1.0 + 1e-12, 0.0]], dtype=torch.float64)
    assert candidate_estimates(row, 2)[0] == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_picks_of_rows_with_something_that_is_not_a_number_are_none(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [0.5, float("inf"), -float("inf")]], dtype=dtype)
    assert picked_ids(rows) == pick(rows).tolist() == [1, 1]
    rows[1, 2] = float("nan")
    assert picked_ids(rows) == [1, NOT_A_NUMBER]
    assert picked_ids(rows[1:]) == [NOT_A_NUMBER]


def test_rows_made_of_an_array_are_that_array() -> None:
    array = np.zeros((2, 3), np.float32)
    rows = tensor_over(array)
    rows[1, 2] = 4.0
    assert as_array(rows) is array
    assert array[1, 2] == 4.0
    assert as_array(rows[1:]).tolist() == [[0.0, 0.0, 4.0]]
    assert as_array(rows * 2).tolist() == (array * 2).tolist()
    assert as_array(torch.full((1, 2), 3, dtype=torch.bfloat16)).tolist() == [[3.0, 3.0]]
