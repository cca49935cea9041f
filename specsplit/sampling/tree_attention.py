"""The tree mask: which entries of one step each entry attends to, and at which position it stands.

It knows only `parents`; slots, lengths and attention windows are the model's. Legend: N entries.
An entry with parent -1 hangs directly on the tokens already in the slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether each entry's parent is the entry before it."""
    return all(parent == index - 1 for index, parent in enumerate(parents))


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Return bool [N, N] on the CPU, true at [i, j] if and only if j is i or an ancestor of i."""
    count = len(parents)
    if is_chain(parents):
        return torch.ones((count, count), dtype=torch.bool).tril_()
    paths: list[int] = []
    for index, parent in enumerate(parents):
        paths.append(1 << index if parent < 0 else paths[parent] | 1 << index)
    row_bytes = (count + 7) // 8
    packed = np.frombuffer(b"".join(path.to_bytes(row_bytes, "little") for path in paths), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(count, row_bytes), axis=1, count=count, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def positions(base_length: int, parents: Sequence[int]) -> list[int]:
    """Return each entry's position: with parent -1 it stands at `base_length`, each child one behind its parent."""
    result: list[int] = []
    for parent in parents:
        result.append(base_length if parent < 0 else result[parent] + 1)
    return result
