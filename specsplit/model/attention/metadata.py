"""The layout of one forward: the sequences of several sessions packed into one row of T tokens.

Knows nothing of models; `function` consumes the spans and biases, `runner` the ids and positions.

    tokens of the step:   [ sequence 0 | sequence 1 | ... )             start, stop of each span
    rows of one slot:     [ base_length | earlier levels | token_ids ) free        [0, end_row) is attended to
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsplit.core.record import record
from specsplit.sampling.tree_attention import ancestor_mask, is_chain
from specsplit.sampling.tree_attention import positions as tree_positions

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' own rule: (batch, head, query position, key position) -> may attend."""
_HIDDEN = float("-inf")
_NO_BIAS = -1
_MOST_KEPT_ROWS = 32
"""Trees of a few rows have few shapes, so their biases are kept; larger ones would only fill memory."""
_Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BiasKind:
    """A kind of bias that layers share: a mask rule beyond causality (None = plainly causal), and heads per KV head."""

    mask: MaskFunction | None
    group: int


@record
class SequenceInput:
    """One session's share of a step.

    `token_ids` are written to the slot's rows behind those that exist. `parents` covers every row behind `base_length`:
    first the rows already there (earlier levels of a tree), then `token_ids`; item i is the index of an earlier row
    behind `base_length`, or -1 for the last committed token. None means a chain right behind `base_length`.
    Logits are wanted for the last `num_logits` tokens.
    """

    slot: int
    base_length: int
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: int = 1

    @property
    def num_tree_rows(self) -> int:
        """Rows behind `base_length`, those of earlier levels included."""
        return len(self.token_ids) if self.parents is None else len(self.parents)


@record
class AttentionMetadata:
    """One step as tensors, E sequences in T tokens.

    `token_ids`, `position_ids` [1, T]; `logit_rows` [sum of num_logits]; `spans` [E, 6], on the CPU: slot, start, stop
    (tokens of the step), first_row, end_row (rows of the slot), bias offset (-1: every row is visible). `biases` holds,
    per kind, the spans' biases [group * t, end_row] one behind the other, 0 or -inf; a span's begins at its offset
    times the group.
    """

    token_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    spans: Tensor
    biases: tuple[Tensor, ...]


def make_metadata(
    sequences: Sequence[SequenceInput], kinds: Sequence[BiasKind], *, dtype: torch.dtype, device: torch.device
) -> AttentionMetadata:
    """Lay out a step for a model with these bias kinds."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    spans: list[list[int]] = []
    biases: list[list[_Array]] = [[] for _ in kinds]
    # Offsets count elements of one query head per KV head, so that one table of spans serves kinds of any group.
    offset = 0
    # A window may hide committed rows as well, so with one no sequence is known to see every row of its slot.
    is_plain = all(kind.mask is None for kind in kinds)
    for sequence in sequences:
        count, start, num_rows = len(sequence.token_ids), len(token_ids), sequence.num_tree_rows
        end_row = sequence.base_length + num_rows
        row_positions = _row_positions(sequence)
        token_ids.extend(sequence.token_ids)
        positions.extend(row_positions[num_rows - count :])
        logit_rows.extend(range(start + count - sequence.num_logits, start + count))
        needs_bias = not is_plain or not _sees_every_row(sequence)
        spans.append(
            [sequence.slot, start, start + count, end_row - count, end_row, offset if needs_bias else _NO_BIAS]
        )
        if needs_bias:
            offset += count * end_row
            for flat, bias in zip(biases, _biases(sequence, row_positions, kinds), strict=True):
                flat.append(bias)
    return AttentionMetadata(
        token_ids=_integers([token_ids]).to(device),
        position_ids=_integers([positions]).to(device),
        logit_rows=_integers(logit_rows).to(device),
        spans=_integers(spans),
        biases=tuple([_joined(flat).to(device=device, dtype=dtype) for flat in biases]),
    )


class OneTokenMetadata:
    """The metadata of one token that sees every row, as in plain decoding and a draft's chain, in memory that stays.

    Laying it out anew takes four times as long. It serves a model on the CPU, one step at a time.
    """

    def __init__(self, kinds: Sequence[BiasKind], dtype: torch.dtype) -> None:
        # Arrays and tensors share their memory: an update of the numbers below is an update of the metadata.
        token_ids, position_ids = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
        spans = np.array([[0, 0, 1, 0, 0, _NO_BIAS]], np.int64)
        self._token_ids, self._position_ids, self._spans = token_ids[0], position_ids[0], spans[0]
        self._metadata = AttentionMetadata(
            token_ids=torch.from_numpy(token_ids),
            position_ids=torch.from_numpy(position_ids),
            logit_rows=_integers([0]),
            spans=torch.from_numpy(spans),
            biases=tuple([_joined([]).to(dtype) for _ in kinds]),
        )
        self._has_masks = any(kind.mask is not None for kind in kinds)

    def try_update(self, sequences: Sequence[SequenceInput]) -> AttentionMetadata | None:
        """Return the metadata of a step, valid until the next call; None for any step but one of one such token."""
        sequence = sequences[0]
        if len(sequences) > 1 or self._has_masks or not _sees_every_row(sequence) or sequence.num_logits != 1:
            return None
        row = sequence.base_length + sequence.num_tree_rows - 1
        self._token_ids[0] = sequence.token_ids[0]
        self._position_ids[0] = row  # along a chain a row's number is its position
        spans = self._spans
        spans[0], spans[3], spans[4] = sequence.slot, row, row + 1
        return self._metadata


def _integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Return int64 values by way of numpy, which takes a fraction of torch's time for a few."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _joined(flat: list[_Array]) -> Tensor:
    if not flat:
        return torch.from_numpy(np.zeros(0, dtype=np.float32))
    return torch.from_numpy(flat[0] if len(flat) == 1 else np.concatenate(flat))


def _sees_every_row(sequence: SequenceInput) -> bool:
    """Return whether the sequence is one token at the end of a chain, as in plain decoding and a draft's chain."""
    if len(sequence.token_ids) != 1:
        return False
    return sequence.parents is None or is_chain(sequence.parents)


def _row_positions(sequence: SequenceInput) -> Sequence[int]:
    """Return the positions of the rows behind `base_length`: base_length + depth below the last committed token."""
    base = sequence.base_length
    if sequence.parents is None:
        return range(base, base + len(sequence.token_ids))
    return tree_positions(base, sequence.parents)


def _biases(sequence: SequenceInput, row_positions: Sequence[int], kinds: Sequence[BiasKind]) -> list[_Array]:
    """Return the bias of the sequence's tokens over the rows [0, end_row) of their slot, by kind, flat."""
    count, num_rows, base = len(sequence.token_ids), len(row_positions), sequence.base_length
    if sequence.parents is None:
        tree = _chain_bias(num_rows)
    else:
        tree = (_tree_bias if num_rows > _MOST_KEPT_ROWS else _known_tree_bias)(tuple(sequence.parents))
    biases: list[_Array] = []
    for kind in kinds:
        # [group, t, committed rows | rows behind them]: all committed rows are visible but those a mask hides.
        bias = np.zeros((kind.group, count, base + num_rows), dtype=np.float32)
        bias[:, :, base:] = tree[num_rows - count :]
        if kind.mask is not None:
            queries = torch.tensor(row_positions[num_rows - count :])
            keys = torch.cat([torch.arange(base), torch.tensor(row_positions)])
            bias[:, ~evaluate_mask(kind.mask, queries, keys).numpy()] = _HIDDEN
        biases.append(bias.reshape(-1))
    return biases


def _tree_bias(parents: tuple[int, ...]) -> _Array:
    """Return [rows, rows]: 0 if a row behind `base_length` sees the other (itself, its ancestors), else -inf."""
    return np.where(ancestor_mask(parents).numpy(), np.float32(0), np.float32(_HIDDEN))


_known_tree_bias = lru_cache(maxsize=256)(_tree_bias)


@lru_cache(maxsize=256)
def _chain_bias(num_rows: int) -> _Array:
    return np.triu(np.full((num_rows, num_rows), _HIDDEN, dtype=np.float32), 1)


def evaluate_mask(mask: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether the rule lets queries attend to keys, bool [queries, keys]; both are positions, not rows."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    allowed = mask(zero, zero, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
    return allowed.expand(1, 1, len(queries), len(keys))[0, 0]
