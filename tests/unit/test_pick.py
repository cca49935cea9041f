"""Scores, picks and candidates: exact arithmetic, ties to the lower id, the same order for draft and target."""

from __future__ import annotations

import pytest
import torch

from specsplit.sampling.noise import gumbel_rows
from specsplit.sampling.pick import pick, scores, top_candidates


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
    ids, values = top_candidates(rows, k)
    for row, found in zip(rows.tolist(), ids.tolist(), strict=True):
        assert found == sorted(range(40), key=lambda token: (-row[token], token))[:k]
    assert torch.equal(values, rows.gather(-1, ids))
    assert torch.equal(ids[:, 0], pick(rows))
    assert torch.equal(rows, before)


def test_more_candidates_than_tokens_returns_them_all() -> None:
    ids, values = top_candidates(torch.tensor([[1.0, 3.0, 2.0]]), 7)
    assert ids.tolist() == [[1, 2, 0]]
    assert values.tolist() == [[3.0, 2.0, 1.0]]


def test_cut_tokens_come_last_without_a_score() -> None:
    row = torch.tensor([[-torch.inf, 2.0, -torch.inf, 1.0]])
    ids, values = top_candidates(row, 4)
    assert ids[0, :2].tolist() == [1, 3]
    assert values.tolist() == [[2.0, 1.0, -torch.inf, -torch.inf]]
