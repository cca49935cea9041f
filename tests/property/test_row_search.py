"""The few tokens that a GPU finds in a row give the picks of the whole row, or none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specsplit.core.types import SamplingParams
from specsplit.sampling.best import best_sums
from specsplit.sampling.cuts import cut
from specsplit.sampling.pick import best_of_rows
from specsplit.sampling.row_search import (
    BOUND,
    NUM_FOUND,
    NUM_SURE,
    POSITION,
    TOP,
    TOTAL,
    WIDTH,
    Found,
    RowSearch,
    search_of,
)
from specsplit.sampling.rows import as_array
from specsplit.sampling.sparse_noise import SparseNoise
from tests.support.same_best import assert_same_or_none

VOCAB, CHUNK = 600, 150
POSITIONS = [5, 9, 6]
NOISE = SparseNoise(7, 0, VOCAB)
CUTS = st.sampled_from(
    [
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05},
        {"top_p": 0.95, "min_p": 0.01},
        {"top_k": 20, "top_p": 0.95},
        {"top_k": 4, "top_p": 0.7},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 1e-3},
    ]
)


def found_by_a_device(logits: torch.Tensor, params: SamplingParams, positions: list[int]) -> Found:
    """Return what the kernels find, by sorts of whole rows."""
    rows = [found_of_row(row, params, position) for row, position in zip(as_array(logits), positions, strict=True)]
    return Found(np.stack(rows))


def found_of_row(row: NDArray[np.float32], params: SamplingParams, position: int) -> NDArray[np.int32]:
    result = np.zeros(WIDTH, np.int32)
    floats = result.view(np.float32)
    top, temperature = row.max(), max(params.temperature, 1e-30)
    wrong = np.random.default_rng(position).uniform(-1, 1, VOCAB)  # a device's own sums are
    with np.errstate(over="ignore", invalid="ignore"):
        near = (row.astype(np.float64) - (top if np.isfinite(top) else 0)) / temperature
        sums = row.astype(np.float64) if params.is_greedy else near + NOISE.all(position) + 4e-3 * wrong
    chunks = [range(first, first + CHUNK) for first in range(0, VOCAB, CHUNK)]
    best = [sorted(chunk, key=lambda token: (-sums[token], token))[:NUM_SURE] for chunk in chunks]
    ids = sorted([token for few in best for token in few], key=lambda token: (-sums[token], token))[:NUM_FOUND]
    result[:NUM_FOUND], floats[NUM_FOUND : 2 * NUM_FOUND] = ids, row[ids]
    weights = np.exp(near)
    for place, token in enumerate(ids):
        greater = row > row[token]
        before = greater | ((row == row[token]) & (np.arange(VOCAB) < token))
        floats[2 * NUM_FOUND + place] = weights[before].sum() * (1 + 5e-6 * wrong[token])
        result[3 * NUM_FOUND + place], result[4 * NUM_FOUND + place] = before.sum(), greater.sum()
    floats[TOP], floats[TOTAL] = top, weights.sum()
    floats[BOUND] = max([sums[few[-1]] for few in best] + [sums[ids[-1]]])
    result[POSITION] = position
    return result


def check_search(logits: torch.Tensor, params: SamplingParams, count: int, *, is_sure: bool = False) -> None:
    positions = POSITIONS[: len(logits)]
    found = found_by_a_device(logits, params, positions)
    if params.is_greedy:
        ours, whole = found.greedy(count), list(best_of_rows(logits, count))
    else:
        ours = found.noisy(params, NOISE, positions, count)
        whole = best_sums(as_array(cut(logits, params)), params.temperature, NOISE, positions, count)
    assert_same_or_none(ours, whole, is_sure=is_sure)


@given(st.integers(0, 2**31), CUTS, st.sampled_from([0.2, 0.7, 1.0, 1.7]), st.sampled_from([1, 4]))
def test_peaked_and_flat_rows_give_the_same_or_nothing(
    seed: int, cuts: dict[str, float], temperature: float, count: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([6.0, 1.0, 0.1])[:, None]
    logits = torch.randn(3, VOCAB, generator=generator) * spread
    check_search(logits, SamplingParams(temperature=temperature, **cuts), count)  # type: ignore[arg-type]


@given(st.integers(0, 2**31), st.sampled_from([0.5, 0.9, 0.95]), st.sampled_from([0, 20]), st.sampled_from([0.7, 1.0]))
def test_a_nucleus_of_peaked_rows_is_always_found(seed: int, top_p: float, top_k: int, temperature: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 6
    check_search(logits, SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k), 1, is_sure=True)


@pytest.mark.parametrize("cuts", [{"top_k": 1}, {"top_k": 3}, {"top_k": 8, "top_p": 0.5}, {"top_k": 3, "min_p": 0.2}])
def test_all_that_cuts_leave_are_as_good_as_more(cuts: dict[str, float]) -> None:
    logits = torch.linspace(0, -60, VOCAB)[None]
    check_search(logits, SamplingParams(temperature=0.1, **cuts), 4, is_sure=True)  # type: ignore[arg-type]


@given(st.integers(0, 2**31), CUTS, st.sampled_from([0.0, 1e-40, 1.0]), st.sampled_from([1, 3]))
def test_ties_and_missing_tokens_give_the_same_or_nothing(
    seed: int, cuts: dict[str, float], temperature: float, count: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(3, VOCAB, generator=generator) * 2).round() / 2
    logits[1, torch.randint(VOCAB, (VOCAB - 5,), generator=generator)] = -torch.inf
    logits[2] = -torch.inf
    cuts = cuts if temperature else {}
    check_search(logits, SamplingParams(temperature=temperature, **cuts), count)  # type: ignore[arg-type]


def test_greedy_finds_as_many_as_a_chunk_gives() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]  # the best all stand in one chunk
    found = found_by_a_device(logits, SamplingParams(), [5])
    assert found.greedy(NUM_SURE) == list(best_of_rows(logits, NUM_SURE))
    assert found.greedy(NUM_SURE + 1) is None


def test_rows_of_another_position_decide_nothing() -> None:
    logits, params = torch.randn(1, VOCAB), SamplingParams(temperature=1.0)
    assert found_by_a_device(logits, params, [5]).noisy(params, NOISE, [6], 1) is None


def test_what_rounding_could_change_is_not_decided() -> None:
    logits, params = torch.full((1, VOCAB), -50.0), SamplingParams(temperature=1.0, top_p=0.5)
    logits[0, 7], logits[0, 8] = 0.0, -1e-6  # with the first the nucleus is full, or just not
    assert found_by_a_device(logits, params, [5]).noisy(params, NOISE, [5], 1) is None
    found = found_by_a_device(logits, plain := SamplingParams(temperature=1.0), [5])
    best = found.noisy(plain, NOISE, [5], 1)
    assert best is not None
    found.rows.view(np.float32)[0, BOUND] = best[0][1][0] - 1e-3  # another token may be as good
    assert found.noisy(plain, NOISE, [5], 1) is None


def test_rows_that_are_no_numbers_have_no_best() -> None:
    logits, params = torch.full((2, VOCAB), -torch.inf), SamplingParams(temperature=1.0)
    logits[1, 3] = torch.nan
    found = found_by_a_device(logits, params, [5, 9])
    assert found.noisy(params, NOISE, [5, 9], 2) == found.greedy(2) == [([], []), ([], [])]


def test_what_changes_the_rows_before_is_not_looked_for() -> None:
    assert search_of(SamplingParams(), 1, 0) == RowSearch()
    assert search_of(SamplingParams(temperature=1.0, top_k=5, top_p=0.5), 1, 0) is not None
    for params in (
        SamplingParams(presence_penalty=1.0),
        SamplingParams(logit_bias=((3, 1.0),)),
    ):
        assert search_of(params, 1, 0) is None
