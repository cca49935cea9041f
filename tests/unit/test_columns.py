"""Rows of some tokens: searched as they are, they give what rows of the whole vocabulary give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specsplit.core.types import SamplingParams, SessionParams
from specsplit.sampling.columns import ColumnNoise, Columns
from specsplit.sampling.sampler import Sampler
from specsplit.sampling.sparse_noise import SparseNoise

SAMPLING = [
    SamplingParams(),
    SamplingParams(presence_penalty=1, logit_bias=((3, 2.0),)),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=20, min_p=0.02),
    SamplingParams(temperature=0.8, top_k=590, top_p=0.95),
    SamplingParams(temperature=1, top_p=0.9, frequency_penalty=0.3, repetition_penalty=1.3),
]


def columns_of(vocab_size: int, seed: int) -> Columns:
    """Return columns whose order is not that of the ids: a third of the tokens, of which some were replaced."""
    drawn = np.random.default_rng(seed).permutation(vocab_size).tolist()
    size = vocab_size // 3
    columns = Columns(sorted(drawn[:size]), vocab_size)
    columns.append(drawn[size : size + 9])
    columns.replace([4, size + 2, 0], drawn[-3:])
    return columns


def test_columns_know_their_tokens_and_tokens_their_columns():
    columns = columns_of(60, 1)
    assert len(set(columns.token_ids.tolist())) == 29
    assert columns.of_tokens[columns.token_ids].tolist() == list(range(29))
    assert np.count_nonzero(columns.of_tokens < 0) == 31
    logits = torch.randn(2, 29)
    rows = columns.over_vocabulary(logits)
    assert torch.equal(rows[:, columns.token_ids], logits)
    assert int(rows.isfinite().sum()) == 58


@pytest.mark.parametrize("vocab_size", [100, 40_000])
def test_a_columns_noise_is_that_of_its_token(vocab_size: int):
    columns, noise = columns_of(vocab_size, 2), SparseNoise(5, 0, vocab_size)
    ours = ColumnNoise(noise, columns)
    assert np.array_equal(ours.all(7), noise.all(7)[columns.token_ids])
    high, values = ours.high(7)
    assert np.array_equal(values, noise.all(7)[columns.token_ids[high]])
    assert len(high) == np.count_nonzero(np.isin(columns.token_ids, noise.high(7)[0]))
    assert ours.one(7, 5) == noise.one(7, int(columns.token_ids[5]))


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("vocab_size", [600, 60_000])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_the_best_of_columns_are_those_of_rows_over_the_vocabulary(
    sampling: SamplingParams, vocab_size: int, spread: float
):
    columns = columns_of(vocab_size, 3)
    sampler = Sampler(SessionParams(sampling=sampling, seed=9), vocab_size, torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, len(columns.token_ids), generator=generator) * spread
    committed, depths, paths = [1, 2, 3, 2], [0, 1, 1], [[], [7], [8]]
    for count in (1, 3, 5000):
        found = list(sampler.best(logits, committed, depths, paths, count, columns))
        assert found == list(sampler.best(columns.over_vocabulary(logits), committed, depths, paths, count))
        assert all(ids for ids, _ in found)
