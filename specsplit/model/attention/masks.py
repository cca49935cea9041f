"""Rules of who attends to whom, and the biases that say so: 0 where a key is seen, else -inf.

Knows nothing of slots or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsplit.sampling.tree_attention import ancestor_mask
from specsplit.sampling.tree_attention import positions as tree_positions

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' own rule: (batch, head, query position, key position) -> may attend."""
_HIDDEN = float("-inf")
_NUM_SAMPLES = 33


def ramp_of(mask: MaskFunction | None, capacity: int) -> Tensor | None:
    """Return the bias [2 * capacity] of a mask that looks at distances only; None for any other mask.

    Key c of the token at position p has the bias ramp[capacity - 1 - p + c]: 0 where it is seen, else -inf.
    """
    ramp = torch.full((2 * capacity,), _HIDDEN)
    if mask is None:
        ramp[:capacity] = 0
        return ramp
    keys = torch.arange(capacity)
    ramp[:capacity] = as_bias(evaluate_mask(mask, keys[-1:], keys))[0]
    # In pairs: a rule of chunks looks like a window to samples that all stand at the ends of chunks.
    pairs = torch.linspace(0, capacity - 2, _NUM_SAMPLES).long()
    queries = torch.cat([pairs, pairs + 1])
    expected = torch.stack([ramp[capacity - 1 - query :][:capacity] for query in queries.tolist()])
    return ramp if torch.equal(as_bias(evaluate_mask(mask, queries, keys)), expected) else None


def as_bias(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, _HIDDEN)


def level_bias(base: int, parents: Sequence[int], count: int, mask: MaskFunction | None, num_columns: int) -> Tensor:
    """Return the bias [count, num_columns] of a tree's last nodes: committed rows, ancestors, itself, as `mask` allows.

    `parents` are those of all nodes, which stand behind `base` committed rows.
    """
    num_rows = len(parents)
    visible: NDArray[np.bool_] = np.zeros((count, num_columns), dtype=np.bool_)
    visible[:, :base] = True
    visible[:, base : base + num_rows] = ancestor_mask(tuple(parents)).numpy()[num_rows - count :]
    if mask is not None:
        positions = torch.tensor(tree_positions(base, parents))
        keys = torch.cat([torch.arange(base), positions])
        visible[:, : base + num_rows] &= evaluate_mask(mask, positions[num_rows - count :], keys).numpy()
    return as_bias(torch.from_numpy(visible))


def evaluate_mask(mask: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether the rule lets queries attend to keys, bool [queries, keys]; both are positions, not rows."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    allowed = mask(zero, zero, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
    return allowed.expand(1, 1, len(queries), len(keys))[0, 0]
