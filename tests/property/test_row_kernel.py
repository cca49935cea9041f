"""The kernel that finds a row's best tokens returns what the computation over all of them returns, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.types import SamplingParams
from specsplit.model.kernels.library import kernel_digest
from specsplit.sampling import best
from specsplit.sampling.best import best_of_logits
from specsplit.sampling.columns import ColumnNoise, Columns
from specsplit.sampling.cuts import cut, cut_by_sorting, has_cuts
from specsplit.sampling.noise import gumbel_rows
from specsplit.sampling.pick import best_of_rows, scores
from specsplit.sampling.row_kernel import best_by_kernel
from specsplit.sampling.sparse_noise import SparseNoise
from tests.support.logit_rows import SHAPES, logits_of

VOCABULARY = 30_011
TEMPERATURES = [1e-320, 1e-45, 1e-3, 0.3, 0.7, 1.0, 3.0, 100.0]
CUTS = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.999}]


@pytest.fixture(autouse=True)
def _has_kernel() -> None:
    if not kernel_digest():
        pytest.skip("nothing compiles here")


@given(
    shape=st.sampled_from(SHAPES),
    vocab_size=st.sampled_from([8193, VOCABULARY]),
    temperature=st.sampled_from(TEMPERATURES),
    cuts=st.sampled_from(CUTS),
    count=st.sampled_from([1, 3, 9]),
    depths=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    seed=st.integers(0, (1 << 64) - 1),
)
@settings(max_examples=250, deadline=None)
def test_the_best_are_those_of_the_full_computation(
    shape: str, vocab_size: int, temperature: float, cuts: dict[str, float], count: int, depths: list[int], seed: int
) -> None:
    params = SamplingParams(temperature=temperature, **cuts)
    rows = torch.from_numpy(logits_of(shape, len(depths), vocab_size, seed))
    before = rows.clone()
    left = cut_by_sorting(rows, params) if has_cuts(params, vocab_size) else rows
    everything = scores(left, temperature, gumbel_rows(seed, 1, 50, 5, vocab_size)[depths])
    noise = SparseNoise(seed, 1, vocab_size)
    found = best_of_logits(rows, params, noise, [50 + depth for depth in depths], count)
    assert found == list(best_of_rows(everything, count))
    assert torch.equal(rows.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("temperature", [1e-17, 1e-16, 1e-12])
def test_far_below_the_top_sums_tie_as_they_do_elsewhere(temperature: float) -> None:
    """There a sum has no digits left for the noise, and of equal sums the lower id is better."""
    rows = torch.zeros(1, 8193)
    rows[0, -300] = 1
    for seed in range(120):
        noise = gumbel_rows(seed, 0, 5, 1, 8193)
        found = best_of_logits(rows, SamplingParams(temperature=temperature), SparseNoise(seed, 0, 8193), [5], 3)
        assert found == list(best_of_rows(scores(rows, temperature, noise), 3)), seed


@pytest.mark.parametrize("cuts", CUTS)
def test_rows_as_models_write_them_need_no_other_way(cuts: dict[str, float]) -> None:
    rows = 4 * torch.randn(4, 151_936, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(temperature=0.7, **cuts)
    found = best_by_kernel(rows, params, SparseNoise(8, 0, 151_936), range(70, 74), 3)
    everything = scores(cut(rows, params), 0.7, gumbel_rows(8, 0, 70, 4, 151_936))
    assert found == list(best_of_rows(everything, 3))


@pytest.mark.parametrize("cuts", CUTS)
def test_columns_have_the_noise_of_their_tokens(cuts: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.random.default_rng(1).permutation(VOCABULARY)[:20_000]
    logits = torch.from_numpy(logits_of("normal", 3, len(order), 9))
    noise = ColumnNoise(SparseNoise(4, 2, VOCABULARY), Columns(order.tolist(), VOCABULARY))
    params = SamplingParams(temperature=0.8, **cuts)
    found = best_of_logits(logits, params, noise, [3, 9, 4], 3)
    monkeypatch.setattr(best, "has_kernel", lambda: False)
    assert found == best_of_logits(logits, params, noise, [3, 9, 4], 3)


def test_rows_that_lie_apart_are_taken_as_they_are() -> None:
    rows = torch.from_numpy(logits_of("normal", 4, VOCABULARY, 3))
    params, noise = SamplingParams(temperature=1.0), SparseNoise(4, 2, VOCABULARY)
    every_second = best_of_logits(rows[::2], params, noise, [1, 2], 2)
    assert every_second == best_of_logits(rows[::2].clone(), params, noise, [1, 2], 2)
    assert best_of_logits(rows[:0], params, noise, [], 2) == []
