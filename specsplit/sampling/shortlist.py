"""The best of logits / T + noise among what the cuts leave, for logits on a GPU: only each row's best come to the CPU.

A GPU would sort the whole vocabulary for a nucleus, and add noise to all of it. What top-k, top-p and min-p leave is
mostly among a thousand tokens; where it is not, or where that hangs on the last digits of a sum, the answer is None,
and the whole rows decide. Legend: N rows, V vocabulary, K tokens of a shortlist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specsplit.core.types import SamplingParams
from specsplit.sampling.best import Best, Logits, best_of_kept
from specsplit.sampling.cuts import COLDEST, Indices, size_of
from specsplit.sampling.sparse_noise import SparseNoise

LENGTH = 1024
_ROUNDING = 1e-6
"""Far above what the order of a sum does to it, and what a GPU's exponential differs by."""


def has_shortlist(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether cuts leave so little of a vocabulary that a shortlist may hold it."""
    cuts = 0 < params.top_k < LENGTH or (params.top_k == 0 and (params.top_p < 1 or params.min_p > 0))
    return not params.is_greedy and cuts and vocab_size > 2 * LENGTH


def best_of_shortlists(
    logits: Tensor, params: SamplingParams, noise: SparseNoise, positions: Sequence[int], count: int
) -> list[Best] | None:
    """Return what `best.best_sums` does of the logits [N, V] after the cuts; None if that takes whole rows.

    Row i gets the noise of `positions[i]`. `logits` have passed penalties and bias, and no cut.
    """
    logits = logits.float()
    values, ids = logits.topk(LENGTH)
    scale = max(params.temperature, COLDEST)
    totals = ((logits - values[:, :1]) / scale).exp_().sum(-1, keepdim=True)
    # Ids below 2^24 are exact in float32, so that one copy brings all.
    copied = torch.cat([values, ids.float(), totals], dim=1).cpu().numpy()
    found = [_best(row, params, noise, position, count) for row, position in zip(copied, positions, strict=True)]
    known = [best for best in found if best is not None]
    return known if len(known) == len(found) else None


def _best(row: Logits, params: SamplingParams, noise: SparseNoise, position: int, count: int) -> Best | None:
    """Return the best of one row: [logits, the best first | their ids | the sum of the whole row's weights]."""
    values, ids = row[:LENGTH], row[LENGTH:-1]
    if not math.isfinite(values[0]):
        return [], []
    kept = _kept(values, ids, row[-1].item(), params)
    if kept is None:
        return None
    kept_ids = ids[kept].astype(np.intp)
    return best_of_kept(kept_ids, values[kept], params.temperature, noise.hashes(position, kept_ids), count)


def _kept(values: Logits, ids: Logits, total: float, params: SamplingParams) -> Indices | None:
    """Return the places that `cuts.cut` keeps of a shortlist, whose logits descend; None if it takes the whole row.

    `total` is the sum of the weights of the whole row.
    """
    size = len(values)
    if params.top_k:
        size = _count(values, values[params.top_k - 1])
        if size == len(values) and math.isfinite(values[-1]):  # others beyond the list may be as good
            return None
    border_size = size
    if params.top_p < 1:
        with np.errstate(over="ignore"):
            weights = np.exp((values[:size] - values[0]) / np.float32(max(params.temperature, COLDEST)))
        mass = np.cumsum(weights, dtype=np.float64)
        wanted = params.top_p * (mass[-1].item() if params.top_k else total)
        found = size_of(mass, wanted * (1 - _ROUNDING), wanted * (1 + _ROUNDING))
        if found is None:
            return None
        size, border_size = found, _count(values, values[found - 1])
    if params.min_p > 0:
        lowest = values[0] + np.float32(params.temperature * math.log(params.min_p))
        num_likely = _count(values, lowest)
        size, border_size = min(size, num_likely), min(border_size, num_likely)
    if border_size == len(values):  # others beyond the list may be as good
        return None
    # Of equal logits at the border those with the lowest ids stay.
    first = len(values) - np.searchsorted(values[::-1], values[size - 1], side="right").item()
    at_border = first + np.argsort(ids[first:border_size], kind="stable")
    return np.concatenate([np.arange(first), at_border[: size - first]])


def _count(values: Logits, least: np.float32) -> int:
    """Return how many of some values, which descend, are at least so large."""
    return len(values) - np.searchsorted(values[::-1], least, side="left").item()
