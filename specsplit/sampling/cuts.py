"""The cuts top-k, top-p and min-p, on a CPU without sorting what they leave out.

A logit of -inf is cut. Top-p takes its probabilities at the temperature, among what top-k leaves. Legend: N rows,
V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsplit.core.types import SamplingParams
from specsplit.sampling.rows import as_array, nth_best, tensor_over

COLDEST = 1e-30
_ROUNDING = 1e-9
"""Far above what the order of a sum in float64 does to it."""
_NEAR = 26.0
"""Tokens so many nats below the best are so unlikely that, all together, they hardly ever decide a border."""
_LARGE_SHARE = 16
"""Up to a sixteenth of the vocabulary the tokens near the best are worth a look of their own."""

Logits = NDArray[np.float32]
Indices = NDArray[np.intp]


def cut(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return float32 logits [N, V] with -inf in place of each that is cut; the input itself if there is no cut."""
    has_top_k = 0 < params.top_k < logits.shape[-1]
    if not has_top_k and params.top_p == 1 and params.min_p == 0:
        return logits
    if not logits.is_cpu:
        return cut_by_sorting(logits, params)
    rows = as_array(logits)
    result = np.full(rows.shape, -np.inf, np.float32)
    for index, row in enumerate(rows):
        with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf
            kept = _kept(row, params)
        if kept is None:
            result[index] = cut_by_sorting(torch.from_numpy(rows[index : index + 1]), params).numpy()[0]
        else:
            result[index, kept] = row.take(kept)
    return tensor_over(result)


def cut_by_sorting(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return `cut` of float32 logits [N, V] on any device; there is at least one cut."""
    has_top_k = 0 < params.top_k < logits.shape[-1]
    surplus = None
    if has_top_k or params.top_p < 1:
        ranked = logits.sort(dim=-1, descending=True).values
        lowest_rank = params.top_k - 1 if has_top_k else -1
        best, border = ranked[:, :1], ranked[:, lowest_rank].unsqueeze(-1)
        if params.top_p < 1:
            border, surplus = _nucleus(logits, ranked, border, params)
    else:
        best = logits.amax(dim=-1, keepdim=True)
        border = torch.full_like(best, -torch.inf)
    if params.min_p > 0:
        border = torch.maximum(border, best + params.temperature * math.log(params.min_p))
    outside = logits < border
    if surplus is not None:
        outside |= surplus
    return logits.masked_fill(outside, -torch.inf)


def _nucleus(logits: Tensor, ranked: Tensor, lowest: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Return the lowest logit [N, 1] of the smallest set of likeliest tokens whose mass reaches `top_p`.

    Only logits from `lowest` on count. Of equal logits the lower ids come first; where the border separates
    some, the second tensor, bool [N, V], marks those outside. Sums run in float64, so that they depend neither
    on the number of rows nor on the device.
    """
    vocab_size = logits.shape[-1]
    # Colder than COLDEST, the temperature would vanish in float32 and the best token's weight with it.
    weights = (ranked - ranked[:, :1]).div_(max(params.temperature, COLDEST)).exp_()
    if params.top_k:
        weights.masked_fill_(ranked < lowest, 0)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    # A token belongs to the set while the mass of those before it falls short. Logits that are NaN find no place:
    # the clamp keeps one session's broken row from failing an indexing kernel, and with it the device.
    sizes = 1 + torch.searchsorted(mass, params.top_p * mass[:, -1:]).clamp_(max=vocab_size - 1)
    border = ranked.gather(-1, sizes - 1)
    is_split = (sizes < vocab_size) & (ranked.gather(-1, sizes.clamp(max=vocab_size - 1)) == border)
    if not bool(is_split.any()):
        return border, None
    room = sizes - (ranked > border).sum(dim=-1, keepdim=True)
    at_border = logits == border
    return border, at_border & (at_border.cumsum(dim=-1) > room)


def _kept(row: Logits, params: SamplingParams) -> Indices | None:
    """Return the ids that `cut_by_sorting` keeps of one row [V]; None if it takes a sort to say."""
    top = row.max()
    if not math.isfinite(top):
        return None
    lowest = np.float32(-np.inf)
    if params.min_p > 0:
        lowest = top + np.float32(params.temperature * math.log(params.min_p))
    if 0 < params.top_k < len(row):
        ids = np.flatnonzero(row >= nth_best(row, params.top_k))
    elif params.top_p < 1:
        ids = None
    else:
        return np.flatnonzero(row >= lowest)
    if params.top_p < 1:
        ids = _nucleus_ids(row, ids, top, params)
    return ids if ids is None or params.min_p == 0 else ids[row.take(ids) >= lowest]


def _nucleus_ids(row: Logits, ids: Indices | None, top: Any, params: SamplingParams) -> Indices | None:
    """Return the smallest set of likeliest tokens whose mass reaches `top_p`, among `ids` or else all.

    Of equal logits the lower ids come first. None if it depends on the last digits of a sum.
    """
    temperature = np.float32(max(params.temperature, COLDEST))
    if ids is None:
        near_ids = _near_nucleus_ids(row, top, temperature, params.top_p)
        if near_ids is not None:
            return near_ids
        # What is far too unlikely has less than half of the mass that may be left out, all of it together.
        weights = _weights(row, top, temperature)
        total = torch.from_numpy(weights).sum(dtype=torch.float64).item()
        ids = np.flatnonzero(weights >= 0.5 * (1 - params.top_p) * total / len(row))
        logits = row.take(ids)
        mass = _mass(logits, top, temperature)
    else:
        logits = row.take(ids)
        mass = _mass(logits, top, temperature)
        total = mass[-1].item()
    size = size_of(mass, params.top_p * total, params.top_p * total)
    return None if size is None else _likeliest(ids, logits, size)


def _near_nucleus_ids(row: Logits, top: Any, temperature: Any, top_p: float) -> Indices | None:
    """Return `_nucleus_ids` from the tokens near the best; None if they are many, or do not decide it."""
    is_near = row >= top - np.float32(_NEAR) * temperature
    if np.count_nonzero(is_near) * _LARGE_SHARE > len(row):
        return None
    ids = np.flatnonzero(is_near)
    logits = row.take(ids)
    mass = _mass(logits, top, temperature)
    # The mass of all others is not summed, only bounded; one nat is far above what rounding does to it.
    total, rest = mass[-1].item(), len(row) * math.exp(1 - _NEAR)
    size = size_of(mass, top_p * total, top_p * (total + rest))
    return None if size is None else _likeliest(ids, logits, size)


def size_of(mass: NDArray[np.float64], least: float, most: float) -> int | None:
    """Return how many tokens reach a mass between `least` and `most`; None if that is not the same for all of these."""
    first, last = np.searchsorted(mass, [least * (1 - _ROUNDING), most * (1 + _ROUNDING)]).tolist()
    return first + 1 if first == last < len(mass) else None


def _likeliest(ids: Indices, logits: Logits, size: int) -> Indices:
    """Return the `size` likeliest of some tokens, of equal ones the first."""
    border = np.partition(logits, len(logits) - size)[len(logits) - size]
    above, at_border = logits > border, logits == border
    room = size - np.count_nonzero(above)
    if room < np.count_nonzero(at_border):
        at_border[np.flatnonzero(at_border)[room:]] = False
    return ids[above | at_border]


def _mass(logits: Logits, top: Any, temperature: Any) -> NDArray[np.float64]:
    """Return the mass of each token and those before it, from the best logit down."""
    return np.cumsum(_weights(np.sort(logits)[::-1], top, temperature), dtype=np.float64)


def _weights(logits: Logits, top: Any, temperature: Any) -> Logits:
    # By torch, whose exponential differs from numpy's in the last bit.
    return torch.from_numpy((logits - top) / temperature).exp_().numpy()
