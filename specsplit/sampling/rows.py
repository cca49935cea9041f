"""Rows of scores as torch and as numpy have them: made of an array, a tensor keeps it at hand.

Behind a forward, whose weights have swept the caches, `Tensor.numpy` takes longer than finding the best of 4,096
tokens; `from_numpy` takes a tenth of it. Views and results of operators are tensors like any other; a tensor of an
array is neither reshaped in place nor deep-copied.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_NAME = "specsplit_array"


def of_array(array: NDArray[Any]) -> Tensor:
    """Return a tensor on the memory of `array`, which it keeps at hand."""
    rows = torch.from_numpy(array)
    setattr(rows, _NAME, array)
    return rows


def as_array(rows: Tensor) -> NDArray[Any]:
    """Return rows that lie on the CPU as numpy has them: their own memory, or a copy of what is half precision."""
    kept: NDArray[Any] | None = getattr(rows, _NAME, None)
    if kept is not None:
        return kept
    return (rows if rows.dtype in (torch.float32, torch.float64) else rows.float()).numpy()
