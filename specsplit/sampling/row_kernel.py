"""The best of rows by a kernel of our own, where a model that was loaded has brought it; else numpy finds them.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specsplit.core.types import SamplingParams
from specsplit.sampling.columns import ColumnNoise
from specsplit.sampling.sparse_noise import SparseNoise

_NAME = "specsplit::best_of_rows"
_torch: Any = torch._C  # pyright: ignore[reportPrivateUsage]
Best = tuple[list[int], list[float]]
"""Token ids, the best first, and their scores."""


def has_kernel() -> bool:
    """Return whether there is such a kernel in this process."""
    try:
        return _torch._dispatch_has_kernel_for_dispatch_key(_NAME, "CPU")
    except RuntimeError:  # nobody has named it
        return False


def best_by_kernel(
    logits: Tensor,
    params: SamplingParams,
    noise: SparseNoise | ColumnNoise,
    positions: Sequence[int],
    count: int,
) -> list[Best] | None:
    """Return `best.best_of_logits`; None if that hangs on the last digits of a sum, or on too many tokens."""
    tokens = None if noise.token_ids is None else torch.from_numpy(noise.token_ids)
    keys = [noise.key(position) for position in positions]
    cuts = params.top_k, params.top_p, params.min_p
    found: list[list[float]] = torch.ops.specsplit.best_of_rows(
        logits.contiguous(), tokens, keys, count, params.temperature, *cuts
    ).tolist()
    best: list[Best] = []
    for number, *row in found:
        if number < 0:
            return None
        size = int(number)
        best.append((list(map(int, row[:size])), row[count : count + size]))
    return best
