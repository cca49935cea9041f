"""The shape of a layer's keys or values, as probing finds it and as the KV slots are laid out by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads and size per head of one layer's keys or values."""

    num_heads: int
    head_dim: int
