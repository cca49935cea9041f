"""Token streams: documents laid end to end, and blocks of them in an order fixed by seed and position.

Which block comes when is a pure function of (seed, position), so a run that resumes sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specsplit.core.errors import InvalidSettings

BLOCK_TOKENS = 2048
"""The longest sequence trained on; shorter ones are cut from blocks, so the order does not depend on their length."""


def pack(documents: Iterable[list[int]], path: Path) -> int:
    """Write the documents end to end as 16-bit ids, whole or not at all; return how many tokens that is."""
    beside = path.with_name(path.name + ".part")
    num_tokens = 0
    with beside.open("wb") as file:
        for ids in documents:
            file.write(np.asarray(ids, dtype=np.uint16).tobytes())
            num_tokens += len(ids)
    beside.replace(path)
    return num_tokens


@dataclass(frozen=True, slots=True)
class Stream:
    """A packed stream of tokens, mapped from its file."""

    tokens: np.ndarray

    @classmethod
    def open(cls, path: Path) -> Stream:
        """Map a packed stream.

        Raises:
            InvalidSettings: it is shorter than a block.
        """
        if path.stat().st_size < 2 * (BLOCK_TOKENS + 1):
            raise InvalidSettings(f"{path} holds fewer than {BLOCK_TOKENS + 1:,} tokens, too few to train on.")
        return cls(np.memmap(path, dtype=np.uint16, mode="r"))

    @property
    def num_blocks(self) -> int:
        """Whole blocks, each with the token after its last one."""
        return (len(self.tokens) - 1) // BLOCK_TOKENS

    def block(self, number: int) -> np.ndarray:
        start = number * BLOCK_TOKENS
        return self.tokens[start : start + BLOCK_TOKENS + 1]

    def batch(self, seed: int, position: int, num_blocks: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and next tokens of the blocks from `position` on, int64 [blocks * 2048 / length, length].

        Each pass over the stream has its own order.
        """
        assert BLOCK_TOKENS % length == 0
        numbers = [self._order(seed, position + i) for i in range(num_blocks)]
        rows = np.stack([self.block(number) for number in numbers]).astype(np.int64)
        inputs, wanted = rows[:, :-1].reshape(-1, length), rows[:, 1:].reshape(-1, length)
        return torch.from_numpy(inputs.copy()), torch.from_numpy(wanted.copy())

    def _order(self, seed: int, position: int) -> int:
        """Return the block at a position: an affine walk over all blocks, another one in each pass."""
        num_blocks = self.num_blocks
        passes, place = divmod(position, num_blocks)
        draw = np.random.default_rng([seed, passes])
        stride, offset = int(draw.integers(1, num_blocks + 1)), int(draw.integers(num_blocks))
        while np.gcd(stride, num_blocks) != 1:
            stride += 1
        return (offset + stride * place) % num_blocks


def windows(stream: Stream, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` windows, spread evenly over the stream, and their next tokens, int64 [count, length].

    Fewer where the stream is shorter.
    """
    possible = (len(stream.tokens) - 1) // length
    numbers = np.unique(np.linspace(0, possible - 1, min(count, possible)).astype(int))
    rows = np.stack([stream.tokens[n * length : n * length + length + 1] for n in numbers]).astype(np.int64)
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
