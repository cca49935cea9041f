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
from specsplit.sampling.best import Best, Logits, ranked
from specsplit.sampling.cuts import COLDEST, Indices, likeliest, mass_of, size_of
from specsplit.sampling.sparse_noise import SparseNoise, gumbel

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
    found: list[Best] = []
    for row, position in zip(copied, positions, strict=True):
        order = np.argsort(row[LENGTH:-1], kind="stable")
        listed, token_ids = row[:LENGTH][order], row[LENGTH:-1][order].astype(np.intp)
        kept = _kept(listed, row[0].item(), row[LENGTH - 1].item(), row[-1].item(), params)
        if kept is None:
            return None
        kept_ids = token_ids[kept]
        sums = listed[kept].astype(np.float64)
        with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf
            sums -= row[0]
            sums /= params.temperature
        sums += gumbel(noise.hashes(position, kept_ids))
        found.append(ranked(kept_ids, sums, count))
    return found


def _kept(row: Logits, top: float, least: float, total: float, params: SamplingParams) -> Indices | None:
    """Return the places that `cuts.cut` keeps of a shortlist [K], whose ids ascend; None if it takes the whole row.

    `top` and `least` are its best and its last logit, `total` the sum of all weights of the whole row.
    """
    if not math.isfinite(top):
        return np.empty(0, np.intp)
    kept = np.arange(len(row))
    if params.top_k:
        border = np.partition(row, len(row) - params.top_k)[len(row) - params.top_k]
        if border <= least:  # others beyond the list may be as good
            return None
        kept = np.flatnonzero(row >= border)
    if params.top_p < 1:
        with np.errstate(over="ignore"):
            mass = mass_of(row[kept], np.float32(top), np.float32(max(params.temperature, COLDEST)))
        wanted = params.top_p * (mass[-1].item() if params.top_k else total)
        size = size_of(mass, wanted * (1 - _ROUNDING), wanted * (1 + _ROUNDING))
        if size is None:
            return None
        kept = likeliest(kept, row[kept], size)
        if row[kept].min() <= least:
            return None
    if params.min_p > 0:
        lowest = np.float32(top) + np.float32(params.temperature * math.log(params.min_p))
        if lowest <= least and not params.top_k and params.top_p == 1:
            return None
        kept = kept[row[kept] >= lowest]
    return kept
