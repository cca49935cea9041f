"""Logits of some tokens only, in an order of their own: which they are, and the noise of these.

So a draft with a trimmed head looks for its best tokens in as many columns as the head has, and not in rows of the
whole vocabulary. Legend: C columns, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specsplit.sampling.rows import as_array, tensor_over
from specsplit.sampling.sparse_noise import Floats, Indices, SparseNoise, Words, gumbel

_CACHED = 1 << 15
"""Up to this vocabulary the noise of all tokens is computed once for draft and target, and kept."""


class Columns:
    """The token of each column, which may change, and the column of each token."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self.token_ids = np.array(token_ids, np.intp)
        """[C]"""
        self.of_tokens = np.full(vocab_size, -1, np.intp)
        """[V]; -1 for a token that has none."""
        self.of_tokens[self.token_ids] = np.arange(len(self.token_ids))

    def append(self, token_ids: Sequence[int]) -> None:
        """Add columns for tokens that have none."""
        self.of_tokens[token_ids] = len(self.token_ids) + np.arange(len(token_ids))
        self.token_ids = np.concatenate([self.token_ids, np.array(token_ids, np.intp)])

    def replace(self, columns: Sequence[int], token_ids: Sequence[int]) -> None:
        """Give columns to tokens that have none, in the place of those that have them."""
        self.of_tokens[self.token_ids[columns]] = -1
        self.of_tokens[token_ids] = columns
        self.token_ids[columns] = token_ids

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Return rows [R, V] of logits [R, C]: tokens that have no column have -inf, as what was cut has."""
        rows = np.full((len(logits), len(self.of_tokens)), -np.inf, np.float32)
        rows[:, self.token_ids] = as_array(logits)
        return tensor_over(rows)

    def tokens(self, columns: Sequence[int]) -> list[int]:
        """Return the tokens of some columns."""
        return self.token_ids[list(columns)].tolist()


class ColumnNoise:
    """A session's noise of the columns, as `SparseNoise` has it of the tokens."""

    def __init__(self, noise: SparseNoise, columns: Columns) -> None:
        self._noise, self._columns = noise, columns
        self.least_high, self.bound = noise.least_high, noise.bound

    @property
    def token_ids(self) -> Indices:
        """The token of each column, [C]."""
        return self._columns.token_ids

    def key(self, position: int) -> int:
        """Return the state from which the hashes of a position's tokens begin, as a signed word."""
        return self._noise.key(position)

    def all(self, position: int) -> Floats:
        """Return the noise of every column, [C]."""
        token_ids = self._columns.token_ids
        if len(self._columns.of_tokens) > _CACHED:
            return gumbel(self._noise.hashes(position, token_ids))
        return self._noise.all(position)[token_ids]

    def high(self, position: int) -> tuple[Indices, Floats]:
        """Return the columns whose noise is high, and that noise."""
        token_ids, noise = self._noise.high(position)
        found = self._columns.of_tokens[token_ids]
        has_column = found >= 0
        return found[has_column], noise[has_column]

    def one(self, position: int, column: int) -> float:
        """Return the noise of one column."""
        return self._noise.one(position, int(self._columns.token_ids[column]))

    def hashes(self, position: int, columns: Indices) -> Words:
        """Return the hash of each column, whose upper half makes its noise."""
        return self._noise.hashes(position, self._columns.token_ids[columns])
