"""The shortlist that a GPU's rows are cut down to gives the picks of the whole rows, or none."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core.types import SamplingParams
from specsplit.sampling.best import best_sums
from specsplit.sampling.cuts import cut
from specsplit.sampling.rows import as_array
from specsplit.sampling.shortlist import LENGTH, best_of_shortlists, has_shortlist
from specsplit.sampling.sparse_noise import SparseNoise
from tests.support.same_best import assert_same_or_none

VOCAB = 3 * LENGTH
POSITIONS = [5, 9, 6]
CUTS = st.sampled_from(
    [
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
        {"top_k": 1},
        {"top_p": 1e-3},
    ]
)


def check_shortlist(logits: torch.Tensor, params: SamplingParams, count: int, *, is_sure: bool = False) -> None:
    noise = SparseNoise(7, 0, VOCAB)
    positions = POSITIONS[: len(logits)]
    ours = best_of_shortlists(logits, params, noise, positions, count)
    whole = best_sums(as_array(cut(logits, params)), params.temperature, noise, positions, count)
    assert_same_or_none(ours, whole, is_sure=is_sure)


@given(st.integers(0, 2**31), CUTS, st.sampled_from([0.2, 0.7, 1.0, 1.7]), st.sampled_from([1, 4]))
def test_peaked_rows_need_no_more_than_their_shortlist(
    seed: int, cuts: dict[str, float], temperature: float, count: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, VOCAB, generator=generator) * 6
    params = SamplingParams(temperature=temperature, **cuts)  # type: ignore[arg-type]
    assert has_shortlist(params, VOCAB)
    check_shortlist(logits, params, count, is_sure=True)


@given(st.integers(0, 2**31), CUTS, st.sampled_from([0.0, 0.3, 1.0]))
def test_flat_rows_and_ties_give_the_same_or_nothing(seed: int, cuts: dict[str, float], spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few different values, so that borders stand among equals.
    logits = (torch.randn(3, VOCAB, generator=generator) * spread * 4).round() / 4
    check_shortlist(logits, SamplingParams(temperature=1.0, **cuts), 3)  # type: ignore[arg-type]


@given(st.integers(0, 2**31), st.sampled_from([5, 10, 39]), st.sampled_from([0.0, 3.0, 5.5, 7.0]))
def test_equals_at_the_border_of_top_k_count_all(seed: int, num_raised: int, height: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:num_raised]] = height
    check_shortlist(logits, SamplingParams(temperature=1.0, top_k=40, top_p=0.5), 1)


def test_equals_without_mass_at_the_border_of_top_k_do_not_count() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 100:110] = torch.arange(10.0)
    check_shortlist(logits, SamplingParams(temperature=1.0, top_k=40, top_p=0.9), 1, is_sure=True)


def test_rows_that_are_no_numbers_have_no_best() -> None:
    logits = torch.full((2, VOCAB), math.nan)
    logits[1] = -math.inf
    found = best_of_shortlists(logits, SamplingParams(temperature=1.0, top_p=0.9), SparseNoise(1, 0, VOCAB), [0, 1], 2)
    assert found == [([], []), ([], [])]


def test_a_tiny_temperature_picks_the_best_logit() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    check_shortlist(logits, SamplingParams(temperature=1e-30, top_p=0.9), 1, is_sure=True)


def test_pure_sampling_and_greedy_have_no_shortlist() -> None:
    assert not has_shortlist(SamplingParams(temperature=1.0), VOCAB)
    assert not has_shortlist(SamplingParams(temperature=0.0, top_k=5), VOCAB)
    assert not has_shortlist(SamplingParams(temperature=1.0, top_p=0.9), LENGTH)
