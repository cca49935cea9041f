"""The best of logits / T + noise on a CPU, exactly, with noise for those tokens only that can be among them.

Noise is bounded, and high for few tokens. A sum that some tokens reach is known early; what is neither high nor near
the best logit falls short of it. Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specsplit.core.types import SamplingParams
from specsplit.sampling.columns import ColumnNoise
from specsplit.sampling.cuts import cut_row, has_cuts, kept_ids
from specsplit.sampling.near import kept_near
from specsplit.sampling.row_kernel import Best, best_by_kernel, has_kernel
from specsplit.sampling.rows import as_array, nth_best_bound
from specsplit.sampling.sparse_noise import LEAST, MOST, Floats, Indices, SparseNoise, Words, gumbel

Logits = NDArray[np.float32]
Noise = SparseNoise | ColumnNoise
_SMALL = 8192
"""Up to this vocabulary the noise of all tokens costs less than finding those that matter."""
_POOL_SHARE = 8
"""Each token of a pool that is an eighth of the vocabulary or less is hashed; else high ones are looked up first."""
_FEW = 1024
"""So many logarithms cost less than finding out which of them are needed."""
_LOWEST = np.finfo(np.float32).min
_SLACK = 1e-6
"""Far above what rounding does to a bound, relative to its terms."""


def rows_to_search(logits: Tensor) -> Tensor | Logits:
    """Return logits as `best_of_logits` takes rows of them without delay: an array, unless a kernel searches them."""
    return logits if _is_for_kernel(logits) else as_array(logits)


def _is_for_kernel(logits: Tensor) -> bool:
    return logits.shape[1] > _SMALL and has_kernel()


def best_of_logits(
    logits: Tensor | Logits, params: SamplingParams, noise: Noise, positions: Sequence[int], count: int
) -> list[Best]:
    """Return the `count` best of each row of float32 logits [N, V] on a CPU, which penalties and a bias have passed.

    They are those of `best_sums` within the cuts of `params`.
    """
    if isinstance(logits, Tensor) and _is_for_kernel(logits):
        best = best_by_kernel(logits, params, noise, positions, count)
        if best is not None:
            return best
    rows = as_array(logits) if isinstance(logits, Tensor) else logits
    if has_cuts(params, rows.shape[1]):
        return best_within_cuts(rows, params, noise, positions, count)
    return best_sums(rows, params.temperature, noise, positions, count)


def best_sums(rows: Logits, temperature: float, noise: Noise, positions: Sequence[int], count: int) -> list[Best]:
    """Return each row's `count` best finite values of (logit - the row's maximum) / temperature + noise.

    Row i gets the noise of `positions[i]`. Of equal sums the lower id comes first. A row whose maximum is not a finite
    number has none.
    """
    # A tiny temperature overflows to -inf, and logits that are no numbers stay so.
    with np.errstate(over="ignore", invalid="ignore"):
        if rows.shape[1] <= _SMALL:
            return _best_of_all(rows, temperature, noise, positions, count)
        return [
            _Search(row, temperature, noise, position).best(count)
            for row, position in zip(rows, positions, strict=True)
        ]


def best_within_cuts(
    rows: Logits, params: SamplingParams, noise: Noise, positions: Sequence[int], count: int
) -> list[Best]:
    """Return `best_sums` of the logits that `cuts.cut` leaves of rows [N, V]."""
    return [
        _best_within_cuts(row, params, noise, position, count) for row, position in zip(rows, positions, strict=True)
    ]


def _best_within_cuts(row: Logits, params: SamplingParams, noise: Noise, position: int, count: int) -> Best:
    if params.top_p < 1 and len(row) > _SMALL:
        best = _best_near(row, params, noise, position, count)
        if best is not None:
            return best
    ids = kept_ids(row, params)
    if ids is not None and len(ids) * _POOL_SHARE <= len(row):
        return best_of_kept(ids, row.take(ids), params.temperature, noise.hashes(position, ids), count)
    return best_sums(cut_row(row, ids, params)[None], params.temperature, noise, [position], count)[0]


def _best_near(row: Logits, params: SamplingParams, noise: Noise, position: int, count: int) -> Best | None:
    """Return the best within cuts if the tokens near the row's best tell which they are."""
    with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf
        kept = kept_near(row, params)
    if kept is None:
        return None
    ids, logits, doubted = kept
    if len(ids) == 1:  # the row's best, whose score is its noise
        return ids.tolist(), [noise.one(position, ids.item())]
    best = best_of_kept(ids, logits, params.temperature, noise.hashes(position, ids), count)
    if doubted > -math.inf and not set(ids[logits <= doubted].tolist()).isdisjoint(best[0]):
        return None
    return best


def best_of_kept(ids: Indices, logits: Logits, temperature: float, hashes: Words, count: int) -> Best:
    """Return `best_sums` of the tokens `ids` alone. Their logits include the row's best; `hashes` is used up."""
    sums = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf
        sums -= sums.max()
        sums /= temperature
    sums += gumbel(hashes)
    return ranked(ids, sums, count)


def best_by_scans(row: NDArray[Any], count: int) -> Best:
    """Return the best of one row [V], which is as it was in the end; a scan for each of a few is faster than a topk."""
    ids: list[int] = []
    values: list[float] = []
    while len(ids) < count:
        token_id = int(row.argmax())
        value: float = row.item(token_id)
        if not math.isfinite(value):
            break
        ids.append(token_id)
        values.append(value)
        row[token_id] = -math.inf
    for token_id, value in zip(ids, values, strict=True):
        row[token_id] = value
    return ids, values


def _best_of_all(rows: Logits, temperature: float, noise: Noise, positions: Sequence[int], count: int) -> list[Best]:
    sums = rows.astype(np.float64)
    sums -= sums.max(axis=1, keepdims=True)
    sums /= temperature
    for row, position in zip(sums, positions, strict=True):
        np.add(row, noise.all(position), out=row)
    return [best_by_scans(row, count) for row in sums]


class _Search:
    """A search in one row [V]."""

    def __init__(self, row: Logits, temperature: float, noise: Noise, position: int) -> None:
        self._row, self._temperature = row, temperature
        self._noise, self._position = noise, position
        self._top_id = int(row.argmax())
        self._top = row.item(self._top_id)

    def best(self, count: int) -> Best:
        if not math.isfinite(self._top):
            return [], []
        row, noise = self._row, self._noise
        floor = self._reached(count)
        pool = row >= self._least_logit(floor - MOST)
        if np.count_nonzero(pool) * _POOL_SHARE <= len(row):
            ids = np.flatnonzero(pool)
            hashes = noise.hashes(self._position, ids)
            if len(ids) > _FEW:
                is_near = row.take(ids) >= self._least_logit(floor - noise.bound)
                chosen = np.flatnonzero(is_near | (hashes >= noise.least_high))
                ids, hashes = ids[chosen], hashes[chosen]
            return ranked(ids, self._sums(ids, gumbel(hashes)), count)
        high_ids, high_noise = noise.high(self._position)
        high_sums = self._sums(high_ids, high_noise)
        floor = max(floor, nth_best_bound(high_sums, count))
        ids = np.flatnonzero(row >= self._least_logit(floor - noise.bound))
        hashes = noise.hashes(self._position, ids)
        chosen = np.flatnonzero(hashes < noise.least_high)
        ids = ids[chosen]
        sums = self._sums(ids, gumbel(hashes[chosen]))
        return ranked(np.concatenate([high_ids, ids]), np.concatenate([high_sums, sums]), count)

    def _reached(self, count: int) -> float:
        """Return a sum that `count` tokens reach."""
        row, noise = self._row, self._noise
        if count == 1:
            return noise.one(self._position, self._top_id)
        return (nth_best_bound(row, count) - self._top) / self._temperature + LEAST

    def _least_logit(self, nats: float) -> np.float32:
        """Return a logit that all tokens have whose logit alone brings them to `nats`."""
        span = (nats - _SLACK * (1 + abs(nats))) * self._temperature
        least = np.float32(self._top + span - _SLACK * (abs(self._top) + abs(span)))
        # Tokens that were cut have no finite logit.
        return max(np.nextafter(least, np.float32(-np.inf)), _LOWEST)

    def _sums(self, ids: Indices, noise: Floats) -> Floats:
        """Return the sums of some tokens, in the arithmetic of `pick.scores`."""
        sums = self._row.take(ids).astype(np.float64)
        sums -= self._top
        sums /= self._temperature
        sums += noise
        return sums


def ranked(ids: Indices, sums: Floats, count: int) -> Best:
    """Return the best of some tokens."""
    found = np.flatnonzero(sums >= nth_best_bound(sums, count))
    pairs = zip((-sums[found]).tolist(), ids[found].tolist(), strict=True)
    best = sorted([pair for pair in pairs if pair[0] < math.inf])[:count]
    return [token_id for _, token_id in best], [-value for value, _ in best]
