"""Lessons of the draft: blocks of one text and the target's hidden states there, which are computed once and kept.

The target's forward is half the time of a step of distillation on a CPU, and a state takes 512 bytes; so it pays there
to go several times over fewer blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.research.train_pair.continuations import ROW_TOKENS
from benchmarks.research.train_pair.data import Stream
from benchmarks.research.train_pair.forward import Forward

KEPT_LENGTH = ROW_TOKENS
"""States are kept of sequences of this length, in which most of the training goes by; longer ones are computed."""


class Teacher:
    """One text and the target that reads it; all but its first `num_kept` blocks are left out, nothing where 0."""

    def __init__(self, stream: Stream, target: Forward, seed: int, num_kept: int = 0) -> None:
        self._stream, self._target, self._seed = stream, target, seed
        self._num_kept = min(num_kept, stream.num_blocks)
        self._kept: dict[int, Tensor] = {}

    @property
    def head(self) -> Tensor:
        """The target's head [V, W]."""
        return self._target.head

    def batch(self, position: int, num_blocks: int, length: int) -> tuple[Tensor, Tensor]:
        """Return token ids int64 [B, length] of the blocks from `position` on, and hidden states [B * length, W].

        Each pass over the blocks that are kept has its own order. On the target's device.
        """
        if not self._num_kept:
            return self._computed(position, num_blocks, length)
        parts = [self._block(self._place(position + i), length) for i in range(num_blocks)]
        return torch.cat([ids for ids, _ in parts]), torch.cat([states for _, states in parts])

    def _block(self, place: int, length: int) -> tuple[Tensor, Tensor]:
        if length != KEPT_LENGTH:
            return self._computed(place, 1, length)
        if place not in self._kept:
            ids, self._kept[place] = self._computed(place, 1, length)
            return ids, self._kept[place]
        ids, _ = self._stream.batch(self._seed, place, 1, length)
        return ids.to(self.head.device), self._kept[place]

    def _computed(self, position: int, num_blocks: int, length: int) -> tuple[Tensor, Tensor]:
        ids, _ = self._stream.batch(self._seed, position, num_blocks, length)
        ids = ids.to(self.head.device)
        with torch.no_grad():
            return ids, self._target.hidden(ids)

    def _place(self, position: int) -> int:
        passes, place = divmod(position, self._num_kept)
        return int(np.random.default_rng([self._seed, passes]).permutation(self._num_kept)[place])
