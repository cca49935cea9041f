"""What one forward reads and writes: entries of several sessions packed into one row of T tokens.

Knows nothing of models; `attention` consumes the spans, `runner` the ids and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsplit.sampling.tree_attention import ancestor_mask

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' own rule: (batch, head, query position, key position) -> may attend."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One session's share of a step.

    `token_ids` are written to the slot's rows behind those that exist. `parents` covers every row behind `base_length`:
    first the rows already there (earlier levels of a tree), then `token_ids`; entry i is the index of an earlier row
    behind `base_length`, or -1 for the last committed token. None means a chain right behind `base_length`.
    Logits are wanted for the last `num_logits` tokens.
    """

    slot: int
    base_length: int
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: int = 1


@dataclass(frozen=True, slots=True)
class Span:
    """Where one entry lies: tokens [start, stop) of the step, rows [first_row, end_row) of its slot."""

    slot: int
    start: int
    stop: int
    first_row: int
    end_row: int
    biases: tuple[Tensor | None, ...]
    """Per mask rule of the model: [stop - start, end_row], 0 or -inf; None where every row is visible."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: `token_ids`, `position_ids` [1, T], `logit_rows` [sum of num_logits], and a span per entry."""

    token_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    spans: tuple[Span, ...]


def make_plan(
    entries: Sequence[Entry], masks: Sequence[MaskFunction | None], *, dtype: torch.dtype, device: torch.device
) -> Plan:
    """Lay out a step; `masks` are the model's rules beyond plain causality (None = plainly causal)."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    spans: list[Span] = []
    for entry in entries:
        count, start = len(entry.token_ids), len(token_ids)
        num_tree_rows = count if entry.parents is None else len(entry.parents)
        end_row = entry.base_length + num_tree_rows
        row_positions = _row_positions(entry, num_tree_rows)
        token_ids.extend(entry.token_ids)
        positions.extend(row_positions[num_tree_rows - count :])
        logit_rows.extend(range(start + count - entry.num_logits, start + count))
        biases = _biases(entry, row_positions, masks, dtype, device)
        spans.append(Span(entry.slot, start, start + count, end_row - count, end_row, biases))
    return Plan(
        token_ids=torch.tensor([token_ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        logit_rows=torch.tensor(logit_rows, device=device),
        spans=tuple(spans),
    )


def _row_positions(entry: Entry, num_tree_rows: int) -> list[int]:
    """Positions of the rows behind `base_length`: base_length + depth below the last committed token."""
    base = entry.base_length
    if entry.parents is None:
        return list(range(base, base + num_tree_rows))
    positions: list[int] = []
    for parent in entry.parents:
        positions.append(base if parent < 0 else positions[parent] + 1)
    return positions


def _biases(
    entry: Entry,
    row_positions: list[int],
    masks: Sequence[MaskFunction | None],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor | None, ...]:
    count, num_tree_rows = len(entry.token_ids), len(row_positions)
    is_single_row = num_tree_rows == 1
    if is_single_row and all(mask is None for mask in masks):
        return (None,) * len(masks)
    base, end_row = entry.base_length, entry.base_length + num_tree_rows
    parents = range(-1, num_tree_rows - 1) if entry.parents is None else entry.parents
    visible = torch.ones(count, end_row, dtype=torch.bool)
    visible[:, base:] = ancestor_mask(parents)[num_tree_rows - count :]
    queries = torch.tensor(row_positions[num_tree_rows - count :])
    keys = torch.cat([torch.arange(base), torch.tensor(row_positions)])
    biases: list[Tensor | None] = []
    for mask in masks:
        allowed = visible if mask is None else visible & evaluate_mask(mask, queries, keys)
        bias = torch.zeros(count, end_row, dtype=dtype).masked_fill_(~allowed, float("-inf"))
        biases.append(bias.to(device))
    return tuple(biases)


def evaluate_mask(mask: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """Return mask's verdict [queries, keys] for positions (not rows) of queries and keys."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    allowed = mask(zero, zero, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
    return allowed.expand(1, 1, len(queries), len(keys))[0, 0]
