"""Rows of numbers in numpy and torch: one memory for both, and the n-th best of a row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ARRAY = "specsplit_array"
"""The attribute by which a tensor knows the numpy array that it was made from."""
_COLUMNS = 512


def tensor_over(array: NDArray[Any]) -> Tensor:
    """Return a tensor on the memory of `array`, which it keeps at hand for `as_array`.

    Right after a forward, whose weights have swept the caches, `Tensor.numpy` takes longer than finding the best of
    4,096 tokens; `from_numpy` takes a tenth of it. Views and results of operators are tensors like any other; a tensor
    made here is neither reshaped in place nor deep-copied.
    """
    rows = torch.from_numpy(array)
    setattr(rows, _ARRAY, array)
    return rows


def as_array(rows: Tensor) -> NDArray[Any]:
    """Return rows on the CPU as a numpy array: their own memory, or a float32 copy of half precision."""
    kept: NDArray[Any] | None = getattr(rows, _ARRAY, None)
    if kept is not None:
        return kept
    return (rows if rows.dtype in (torch.float32, torch.float64) else rows.float()).numpy()


def nth_best(row: NDArray[Any], count: int) -> Any:
    """Return the `count`-th best of a row without NaN, which has as many."""
    if count == 1:
        return row.max()
    # The best of each column are different ones; few of the row's best share a column, so few reach the last of them.
    height = len(row) // _COLUMNS
    if height > 1 and count * 4 <= _COLUMNS:
        row = row[row >= _nth(row[: height * _COLUMNS].reshape(height, _COLUMNS).max(axis=0), count)]
    return _nth(row, count)


def nth_best_bound(row: NDArray[Any], count: int) -> float:
    """Return what `count` of the row reach, mostly near the `count`-th best; -inf if there are fewer."""
    if len(row) < count:
        return -math.inf
    if count == 1:
        return row.max().item()
    height = len(row) // _COLUMNS
    if height > 1 and count * 4 <= _COLUMNS:
        row = row[: height * _COLUMNS].reshape(height, _COLUMNS).max(axis=0)
    return _nth(row, count).item()


def _nth(row: NDArray[Any], count: int) -> Any:
    return np.partition(row, len(row) - count)[len(row) - count]
