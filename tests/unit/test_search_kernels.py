"""A GPU's search in Triton's interpreter, against whole rows: where Triton is installed, and TRITON_INTERPRET is 1."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from specsplit.core.types import SamplingParams
from specsplit.sampling.best import best_sums
from specsplit.sampling.cuts import cut
from specsplit.sampling.pick import best_of_rows
from specsplit.sampling.row_search import Found, search_of
from specsplit.sampling.rows import as_array
from specsplit.sampling.sparse_noise import SparseNoise

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off")
POSITIONS = [5, 9, 6]
CPU = torch.device("cpu")


def rows_of(kind: str, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    if kind == "ties":
        return (logits / 2).round().bfloat16()
    if kind == "cut":
        logits[1, vocab_size // 3 :], logits[2] = -torch.inf, -torch.inf
    if kind == "no numbers":
        logits[1, 7], logits[2, 3] = torch.nan, torch.inf
    return logits


@pytest.mark.parametrize("kept", [None, range(0, 9000, 3)])
@pytest.mark.parametrize("kind", ["usual", "ties", "cut", "no numbers"])
@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05},
        {"top_p": 0.95, "min_p": 0.01},
        {"top_k": 20, "top_p": 0.95},
        {"top_k": 5, "top_p": 0.8},
    ],
)
def test_the_best_are_those_of_whole_rows(cuts: dict[str, float], kind: str, kept: range | None) -> None:
    pytest.importorskip("triton")
    from specsplit.sampling.search_kernels import RowSearcher

    logits = rows_of(kind, 3000)
    kept_ids = None if kept is None else torch.tensor(kept)
    whole, vocab_size = logits.float(), 3000
    if kept_ids is not None:
        vocab_size = 9000
        whole = torch.full((3, vocab_size), -torch.inf)
        whole[:, kept_ids] = logits.float()
    noise = SparseNoise(7, 0, vocab_size)
    for params, count in ((SamplingParams(), 3), (SamplingParams(temperature=0.7, **cuts), 1)):  # type: ignore[arg-type]
        search = search_of(params, 7, 0)
        assert search is not None
        searcher = RowSearcher(3, kept_ids, 3000, CPU)
        searcher.search(logits, torch.from_numpy(np.tile(search.words(), (3, 1))), torch.tensor(POSITIONS) - 1)
        found = Found(searcher.found([0, 1, 2]))
        if params.is_greedy:
            assert found.greedy(count) == list(best_of_rows(whole, count))
            continue
        ours = found.noisy(params, noise, POSITIONS, count)
        truth = best_sums(as_array(cut(whole, params)), 0.7, noise, POSITIONS, count)
        assert ours is not None or "min_p" in cuts or kind == "cut" or (kind == "ties" and "top_k" in cuts)
        assert ours is None or [ids for ids, _ in ours] == [ids for ids, _ in truth]
