"""The layout of one forward: the sequences of several sessions packed into one row of T tokens.

Knows nothing of models; `function` consumes the spans and biases, `runner` the ids and positions.

    tokens of the step:   [ span 0 | span 1 | ... )                         start, stop of each span
    rows of one slot:     [ base_length | earlier levels | token_ids ) free

A span attends to the rows [0, end_row) of its slot, and `end_row` follows from the position of its last token alone, so
that a row is multiplied with as many keys in any company (docs/adr/0015). A tree is laid out path by path: depth first,
each run of nodes down a path is a span whose rows are its positions, and the next run overwrites it; `stores` then
brings every node to its own row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specsplit.core.record import record
from specsplit.sampling.tree_attention import ancestor_mask, is_chain
from specsplit.sampling.tree_attention import positions as tree_positions

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' own rule: (batch, head, query position, key position) -> may attend."""
MOST_ROWS = 60
"""Tokens of one span. From 64 on, torch's attention for half precision may choose another product."""
ROW_MULTIPLE = 4
"""A span of several tokens is filled up to a multiple: the products inside attention are the same for these."""
_HIDDEN = float("-inf")
_NUM_SAMPLES = 33


def end_row(position: int) -> int:
    """Return how many rows of its slot a token at this position is multiplied with, the hidden ones included."""
    return (position // _step(position) + 1) * _step(position)


def slot_rows(num_tokens: int) -> int:
    """Return the rows that a slot needs for so many tokens."""
    return end_row(num_tokens - 1)


def held_tokens(num_rows: int) -> int:
    """Return the tokens that so many rows are enough for."""
    return num_rows // _step(num_rows) * _step(num_rows)


def _step(row: int) -> int:
    return 64 if row < 512 else 128 if row < 2048 else 512


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

    @property
    def is_chain(self) -> bool:
        return self.parents is None or is_chain(self.parents)


@record
class AttentionMetadata:
    """One step as tensors, E spans in T tokens.

    `token_ids`, `position_ids` [1, T]; `logit_rows` [sum of num_logits], in the order of the sequences' tokens.
    `spans` [E, 7] and `stores` [3, N] are on the CPU. A span is (slot, start, stop, first_row, end_row, offset, new):
    tokens of the step, the rows they are written to, the rows attended to, where its bias begins, and whether rows
    behind its own come into sight with it; these are cleared, since what another session left may be infinite.
    `biases` holds, per kind of mask, flat biases of 0 or -inf: [end_row] for a span of one token, else [t filled up to
    a ROW_MULTIPLE, end_row]. `stores` are (slot, token of the step, row): keys and values that go elsewhere once all
    spans have attended.
    `order` [T] is the place of each token of the step among the sequences' tokens, None if they are in place.
    """

    token_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    spans: Tensor
    stores: Tensor
    biases: tuple[Tensor, ...]
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive tokens of the step: down one path, at the positions behind `first_row`, or a level of a tree."""

    slot: int
    start: int
    stop: int
    first_row: int
    end_row: int
    is_new: bool
    """Whether it is the first to attend to some of its rows."""
    level: SequenceInput | None = None
    """Set for a level: its rows stand where the tree's rows stand, and see their ancestors only."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class _Step:
    """The lists from which a step's tensors are made."""

    token_ids: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    order: list[int] = field(default_factory=list[int])
    logit_rows: list[int] = field(default_factory=list[int])
    spans: list[_Span] = field(default_factory=list[_Span])
    stores: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    sight: dict[int, int] = field(default_factory=dict[int, int])
    """Rows that the spans of each slot attend to so far."""

    def add_run(self, slot: int, first_row: int, count: int) -> None:
        """Add spans for the next `count` tokens, consecutive positions down one path."""
        start = len(self.token_ids)
        for first, stop in _pieces(first_row, first_row + count):
            begin, end = start + first - first_row, end_row(stop - 1)
            # Another path of the same step may be there already, and must not be cleared.
            before = max(end_row(first - 1) if first else 0, self.sight.get(slot, 0))
            self.spans.append(_Span(slot, begin, begin + stop - first, first, end, is_new=before < end))
            self.sight[slot] = max(before, end)

    def add_chain(self, sequence: SequenceInput) -> None:
        count = len(sequence.token_ids)
        first_row = sequence.base_length + sequence.num_tree_rows - count
        self.add_run(sequence.slot, first_row, count)
        self._add_tokens(sequence, range(count), range(first_row, first_row + count))

    def add_level(self, sequence: SequenceInput) -> None:
        """Add a level of a tree whose earlier rows are in the slot, every node on its own row."""
        assert sequence.parents is not None
        start, count, base = len(self.token_ids), len(sequence.token_ids), sequence.base_length
        last_row = base + len(sequence.parents)
        end = end_row(last_row - 1)
        is_new = base == 0 or end_row(base - 1) < end
        self.spans.append(_Span(sequence.slot, start, start + count, last_row - count, end, is_new, sequence))
        self._add_tokens(sequence, range(count), tree_positions(base, sequence.parents)[-count:])

    def add_tree(self, sequence: SequenceInput) -> None:
        """Add a tree path by path, depth first."""
        assert sequence.parents is not None
        start, base = len(self.token_ids), sequence.base_length
        nodes, depths = _depth_first(sequence.parents)
        held: dict[int, int] = {}
        first = 0
        for place in range(1, len(nodes) + 1):
            if place < len(nodes) and sequence.parents[nodes[place]] == nodes[place - 1]:
                continue
            run = slice(first, place)
            self.add_run(sequence.slot, base + depths[first], place - first)
            held.update(zip(depths[run], nodes[run], strict=True))
            self._add_tokens(
                sequence, nodes[run], range(base + depths[first], base + depths[first] + place - first), start
            )
            first = place
        for place, node in enumerate(nodes):
            if held.get(node) != node:
                self.stores.append((sequence.slot, start + place, base + node))

    def _add_tokens(
        self, sequence: SequenceInput, nodes: Sequence[int], positions: Sequence[int], start: int | None = None
    ) -> None:
        start = len(self.token_ids) if start is None else start
        self.token_ids.extend([sequence.token_ids[node] for node in nodes])
        self.positions.extend(positions)
        self.order.extend([start + node for node in nodes])

    def add(self, sequence: SequenceInput, *, by_path: bool) -> None:
        start, count = len(self.token_ids), len(sequence.token_ids)
        if sequence.is_chain:
            self.add_chain(sequence)
        elif by_path and sequence.num_tree_rows == count:
            self.add_tree(sequence)
        else:
            self.add_level(sequence)
        self.logit_rows.extend(range(start + count - sequence.num_logits, start + count))


def _pieces(first_row: int, stop_row: int) -> Iterator[tuple[int, int]]:
    """Cut consecutive rows where the number of rows attended to changes, and into at most MOST_ROWS each."""
    while first_row < stop_row:
        limit = min(stop_row, end_row(first_row))
        num_pieces = -(-(limit - first_row) // MOST_ROWS)
        stop = first_row + -(-(limit - first_row) // num_pieces)
        yield first_row, stop
        first_row = stop


def _depth_first(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the nodes of a tree in depth-first order, children in their own order, and the depth of each."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    nodes: list[int] = []
    depths: list[int] = []
    waiting = [(node, 0) for node in reversed(children.get(-1, []))]
    while waiting:
        node, depth = waiting.pop()
        nodes.append(node)
        depths.append(depth)
        waiting.extend((child, depth + 1) for child in reversed(children.get(node, [])))
    return nodes, depths


class MetadataBuilder:
    """Lays out the steps of one model, whose layers share a few kinds of masks (None = plainly causal).

    `capacity` is that of a slot. `by_path` lays a tree out path by path, for the same bits in any tree; without it a
    tree is one span, which takes fewer calls.
    """

    def __init__(
        self,
        masks: Sequence[MaskFunction | None],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        by_path: bool,
    ) -> None:
        self._masks, self._capacity, self._by_path = masks, capacity, by_path
        self._dtype, self._device = dtype, device
        found = [_ramp(mask, capacity) for mask in masks]
        self._ramps = [None if ramp is None else ramp.to(device=device, dtype=dtype) for ramp in found]
        self._one_token = _OneToken([ramp for ramp in self._ramps if ramp is not None], capacity)
        self._has_ramps = len(masks) > 0 and all(ramp is not None for ramp in self._ramps)

    def build(self, sequences: Sequence[SequenceInput]) -> AttentionMetadata:
        """Lay out a step. What one token alone gets is valid until the next call."""
        if len(sequences) == 1 and self._has_ramps and self._device.type == "cpu":
            sequence = sequences[0]
            if len(sequence.token_ids) == 1 and sequence.num_logits == 1 and sequence.is_chain:
                return self._one_token.updated(sequence)
        step = _Step()
        for sequence in sequences:
            step.add(sequence, by_path=self._by_path)
        offsets, biases = self._biases(step.spans)
        order = None if _is_in_place(step.order) else _integers(step.order)
        logit_rows = _integers(step.logit_rows)
        if order is not None:
            logit_rows = torch.argsort(order)[logit_rows]
        return AttentionMetadata(
            token_ids=_integers([step.token_ids]).to(self._device),
            position_ids=_integers([step.positions]).to(self._device),
            logit_rows=logit_rows.to(self._device),
            spans=_integers(
                [
                    [span.slot, span.start, span.stop, span.first_row, span.end_row, offset, span.is_new]
                    for span, offset in zip(step.spans, offsets, strict=True)
                ]
            ),
            stores=_integers(step.stores).reshape(-1, 3).t(),
            biases=biases,
            order=order,
        )

    def _biases(self, spans: Sequence[_Span]) -> tuple[list[int], tuple[Tensor, ...]]:
        """Return where each span's bias begins, and the flat biases of each kind."""
        if self._has_ramps and all(span.num_tokens == 1 and span.level is None for span in spans):
            # A token sees a part of the ramp, so the ramp itself is the bias of all.
            ramps = tuple([ramp for ramp in self._ramps if ramp is not None])
            return [self._capacity - 1 - span.first_row for span in spans], ramps
        offsets = np.cumsum([0] + [_num_rows(span.num_tokens) * span.end_row for span in spans]).tolist()
        return offsets[:-1], tuple([self._flat(kind, spans) for kind in range(len(self._masks))])

    def _flat(self, kind: int, spans: Sequence[_Span]) -> Tensor:
        parts = [self._bias(kind, span) for span in spans]
        return torch.cat([part.reshape(-1) for part in parts])

    def _bias(self, kind: int, span: _Span) -> Tensor:
        """Return the bias [rows, end_row] of one span; rows that only fill it up see everything."""
        count, ramp, mask = span.num_tokens, self._ramps[kind], self._masks[kind]
        if span.level is not None:
            bias = _level_bias(span.level, mask, span.end_row).to(device=self._device, dtype=self._dtype)
        elif ramp is not None:
            # Row by row the ramp moves on by one; the last row's begins first.
            begin = self._capacity - span.first_row - count
            bias = ramp.as_strided((count, span.end_row), (1, 1), begin).flip(0)
        else:
            assert mask is not None
            queries = torch.arange(span.first_row, span.first_row + count)
            bias = _as_bias(evaluate_mask(mask, queries, torch.arange(span.end_row)))
            bias = bias.to(device=self._device, dtype=self._dtype)
        return F.pad(bias, (0, 0, 0, _num_rows(count) - count))


class _OneToken:
    """The metadata of one token at the end of a chain, as in plain decoding, in memory that stays.

    Laying it out anew takes four times as long. It serves a model on the CPU, one step at a time.
    """

    def __init__(self, ramps: Sequence[Tensor], capacity: int) -> None:
        # Arrays and tensors share their memory: an update of the numbers below is an update of the metadata.
        token_ids, position_ids = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
        spans = np.array([[0, 0, 1, 0, 0, 0, 0]], np.int64)
        self._token_ids, self._position_ids, self._spans = token_ids[0], position_ids[0], spans[0]
        self._capacity = capacity
        self._metadata = AttentionMetadata(
            token_ids=torch.from_numpy(token_ids),
            position_ids=torch.from_numpy(position_ids),
            logit_rows=_integers([0]),
            spans=torch.from_numpy(spans),
            stores=torch.zeros(3, 0, dtype=torch.int64),
            biases=tuple(ramps),
        )

    def updated(self, sequence: SequenceInput) -> AttentionMetadata:
        row = sequence.base_length + sequence.num_tree_rows - 1
        self._token_ids[0] = sequence.token_ids[0]
        self._position_ids[0] = row  # along a chain a row's number is its position
        spans = self._spans
        spans[0], spans[3], spans[4], spans[5] = sequence.slot, row, end_row(row), self._capacity - 1 - row
        spans[6] = row == 0 or end_row(row - 1) < end_row(row)
        return self._metadata


def _ramp(mask: MaskFunction | None, capacity: int) -> Tensor | None:
    """Return the bias [2 * capacity] of a mask that looks at distances only; None for any other mask.

    Key c of the token at position p has the bias ramp[capacity - 1 - p + c]: 0 where it is seen, else -inf.
    """
    ramp = torch.full((2 * capacity,), _HIDDEN)
    if mask is None:
        ramp[:capacity] = 0
        return ramp
    keys = torch.arange(capacity)
    ramp[:capacity] = _as_bias(evaluate_mask(mask, keys[-1:], keys))[0]
    # In pairs: a rule of chunks looks like a window to samples that all stand at the ends of chunks.
    pairs = torch.linspace(0, capacity - 2, _NUM_SAMPLES).long()
    queries = torch.cat([pairs, pairs + 1])
    expected = torch.stack([ramp[capacity - 1 - query :][:capacity] for query in queries.tolist()])
    return ramp if torch.equal(_as_bias(evaluate_mask(mask, queries, keys)), expected) else None


def _as_bias(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, _HIDDEN)


def _num_rows(count: int) -> int:
    return 1 if count == 1 else -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def _is_in_place(order: Sequence[int]) -> bool:
    return all(place == token for place, token in enumerate(order))


def _integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Return int64 values by way of numpy, which takes a fraction of torch's time for a few."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _level_bias(level: SequenceInput, mask: MaskFunction | None, num_columns: int) -> Tensor:
    """Return the bias [t, num_columns] of a level: committed rows, itself and ancestors, as `mask` allows."""
    assert level.parents is not None
    base, num_rows, count = level.base_length, len(level.parents), len(level.token_ids)
    visible: NDArray[np.bool_] = np.zeros((count, num_columns), dtype=np.bool_)
    visible[:, :base] = True
    visible[:, base : base + num_rows] = ancestor_mask(tuple(level.parents)).numpy()[num_rows - count :]
    if mask is not None:
        positions = torch.tensor(tree_positions(base, level.parents))
        keys = torch.cat([torch.arange(base), positions])
        visible[:, : base + num_rows] &= evaluate_mask(mask, positions[num_rows - count :], keys).numpy()
    return _as_bias(torch.from_numpy(visible))


def evaluate_mask(mask: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether the rule lets queries attend to keys, bool [queries, keys]; both are positions, not rows."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    allowed = mask(zero, zero, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
    return allowed.expand(1, 1, len(queries), len(keys))[0, 0]
