"""Rules of who attends to whom, and the biases that say so: 0 where a key is seen, else -inf.

Knows nothing of slots or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsplit.model.transformers_models import causal_mask_function
from specsplit.sampling.tree_attention import positions as tree_positions

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' own rule: (batch, head, query position, key position) -> may attend."""
_HIDDEN = float("-inf")
_NUM_SAMPLES = 33


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """Our mask interface hands this to the layers instead of a tensor."""

    function: MaskFunction
    is_vectorised: bool
    """False if transformers would need vmap, which takes no positions of a tree."""

    @property
    def is_plain_causal(self) -> bool:
        return self.function is causal_mask_function


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


def level_bias(
    base: int, parents: Sequence[int], count: int, mask: MaskFunction | None, shape: tuple[int, int]
) -> Tensor:
    """Return the bias of a tree's last `count` nodes: committed rows, ancestors, itself, as `mask` allows.

    `parents` are those of all nodes, which stand behind `base` committed rows. The bias has `shape`, at least `count`
    rows and as many columns as the slot has in sight; rows beyond the nodes see everything. Ancestors are followed one
    by one: a level has a few nodes, each with a few.
    """
    num_nodes = len(parents)
    bias: NDArray[np.float32] = np.zeros(shape, np.float32)
    bias[:count, base:] = _HIDDEN
    rows: list[int] = []
    columns: list[int] = []
    for row in range(count):
        seen = num_nodes - count + row
        while seen >= 0:
            rows.append(row)
            columns.append(base + seen)
            seen = parents[seen]
    bias[rows, columns] = 0.0
    if mask is not None:
        positions = torch.tensor(tree_positions(base, parents))
        keys = torch.cat([torch.arange(base), positions])
        is_seen = evaluate_mask(mask, positions[num_nodes - count :], keys).numpy()
        bias[:count, : base + num_nodes][~is_seen] = _HIDDEN
    return torch.from_numpy(bias)


def evaluate_mask(mask: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether the rule lets queries attend to keys, bool [queries, keys]; both are positions, not rows."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    allowed = mask(zero, zero, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
    return allowed.expand(1, 1, len(queries), len(keys))[0, 0]
