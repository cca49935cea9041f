"""The shape of a tree of entries: whether it is a chain, and at which position each entry stands.

It knows only `parents`; slots, lengths and attention windows are the model's. An entry
with parent -1 hangs directly on the tokens already in the slot.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether each entry's parent is the entry before it."""
    return all(parent == index - 1 for index, parent in enumerate(parents))


def positions(base_length: int, parents: Sequence[int]) -> list[int]:
    """Return each entry's position: with parent -1 it stands at `base_length`, each child one behind its parent."""
    result: list[int] = []
    for parent in parents:
        result.append(base_length if parent < 0 else result[parent] + 1)
    return result
