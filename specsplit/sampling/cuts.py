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
FLOAT32_ROUNDING = 3e-6
"""Above what numpy's exponential and its sums are off in float32: it adds few numbers in a row, then sums in pairs."""
_SMALL = 8192
"""Up to this vocabulary a sum in float64 costs less than what might save it."""
_LIKELY, _UNLIKELY = 1e-4, 2e-6
"""The least probability of the tokens that are looked at next, and of those behind them."""

Logits = NDArray[np.float32]
Indices = NDArray[np.intp]


def has_cuts(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether top-k, top-p or min-p may cut a token of such a vocabulary."""
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def cut(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return float32 logits [N, V] with -inf in place of each that is cut; the input itself if there is no cut."""
    if not has_cuts(params, logits.shape[-1]):
        return logits
    if not logits.is_cpu:
        return cut_by_sorting(logits, params)
    rows = as_array(logits)
    result = np.empty(rows.shape, np.float32)
    for row, left in zip(rows, result, strict=True):
        left[:] = cut_row(row, kept_ids(row, params), params)
    return tensor_over(result)


def cut_row(row: Logits, kept: Indices | None, params: SamplingParams) -> Logits:
    """Return `cut` of one row [V], of which `kept_ids` said `kept`."""
    if kept is None:
        return cut_by_sorting(torch.from_numpy(row[None]), params).numpy()[0]
    result = np.full_like(row, -np.inf)
    result[kept] = row.take(kept)
    return result


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


def kept_ids(row: Logits, params: SamplingParams) -> Indices | None:
    """Return the ids, which ascend, that `cut_by_sorting` keeps of one row [V]; None if it takes a sort to say."""
    with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf
        return _kept(row, params)


def _kept(row: Logits, params: SamplingParams) -> Indices | None:
    top = row[row.argmax()]
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
        nucleus = _Nucleus(row, top, params)
        ids = nucleus.of_all() if ids is None else nucleus.among(ids)
    return ids if ids is None or params.min_p == 0 else ids[row.take(ids) >= lowest]


def size_of(mass: NDArray[np.float64], least: float, most: float) -> int | None:
    """Return how many tokens reach a mass between `least` and `most`; None if that is not the same for all of these."""
    first, last = np.searchsorted(mass, [least * (1 - _ROUNDING), most * (1 + _ROUNDING)]).tolist()
    return first + 1 if first == last < len(mass) else None


def are_largest(logits: Logits, border: Any, size: int) -> NDArray[np.bool_]:
    """Return which of some logits are the `size` largest, whose least is `border`; of equal ones the first are."""
    is_among = logits >= border
    surplus = np.count_nonzero(is_among) - size
    if surplus:
        is_among[np.flatnonzero(logits == border)[-surplus:]] = False
    return is_among


class _Nucleus:
    """The smallest set of one row's likeliest tokens whose mass reaches `top_p`; of equal logits the lower ids first.

    A method returns None where what it knows of the mass leaves the nucleus' border open.
    """

    def __init__(self, row: Logits, top: Any, params: SamplingParams) -> None:
        self._row, self._top, self._top_p = row, top, params.top_p
        self._temperature = np.float32(max(params.temperature, COLDEST))

    def of_all(self) -> Indices | None:
        """Return the nucleus of the row."""
        found = self._among_likely() if len(self._row) > _SMALL else None
        return self._among_unlikely() if found is None else found

    def among(self, ids: Indices, least_rest: float = 0.0, most_rest: float = 0.0) -> Indices | None:
        """Return the nucleus if it lies in `ids`, which ascend; others have a mass from `least_rest` to `most_rest`."""
        logits = self._row.take(ids)
        ranked = np.sort(logits)[::-1]
        mass = np.cumsum(self._weights(ranked), dtype=np.float64)
        own = mass[-1].item() if len(ids) else 0.0
        size = size_of(mass, self._top_p * (own + least_rest), self._top_p * (own + most_rest))
        return None if size is None else ids[are_largest(logits, ranked[size - 1], size)]

    def _among_likely(self) -> Indices | None:
        """Return the nucleus from the likely tokens, with a sum in float32."""
        weights = self._scaled(self._row)
        total = np.exp(weights, out=weights).sum().item()
        return self._from_least(weights, total, _LIKELY, FLOAT32_ROUNDING)

    def _among_unlikely(self) -> Indices | None:
        """Return the nucleus from more tokens, with a sum in float64."""
        weights = self._weights(self._row)
        total = torch.from_numpy(weights).sum(dtype=torch.float64).item()
        # What is less likely than that has less than half of the mass that may be left out, all of it together.
        lowest = 0.5 * (1 - self._top_p) / len(weights)
        found = self._from_least(weights, total, _UNLIKELY, 0.0) if lowest < _UNLIKELY else None
        return self._from_least(weights, total, lowest, 0.0) if found is None else found

    def _from_least(self, weights: Logits, total: float, probability: float, rounding: float) -> Indices | None:
        """Return the nucleus from tokens of at least that probability; `total`, all of the mass, is so far off."""
        least = probability * total
        ids = np.flatnonzero(weights >= least)
        rest = total - weights.take(ids).sum(dtype=np.float64).item()
        if rest > (1 - self._top_p + FLOAT32_ROUNDING) * total:
            return None  # others belong to it
        found = self.among(ids, rest - rounding * total, rest + rounding * total)
        # In their last bits weights may fall where logits rise, so a border there may belong to a token left out.
        if found is None or weights.take(found).min() < least * (1 + FLOAT32_ROUNDING):
            return None
        return found

    def _weights(self, logits: Logits) -> Logits:
        # By torch, as in `cut_by_sorting`: its exponential differs from numpy's in the last bit.
        return torch.from_numpy(self._scaled(logits)).exp_().numpy()

    def _scaled(self, logits: Logits) -> Logits:
        scaled = logits - self._top
        scaled /= self._temperature
        return scaled
