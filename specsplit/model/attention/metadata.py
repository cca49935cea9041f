"""The layout of one forward: the sequences of several sessions packed into one row of T tokens.

Knows nothing of models; `function` consumes the spans and biases, `runner` the ids and positions.

    tokens of the step:   [ span 0 | span 1 | ... )                         start, stop of each span
    rows of one slot:     [ base_length | earlier levels | token_ids ) free

A span attends to the rows [0, end_row) of its slot, and `end_row` follows from the position of its last token alone, so
that a row is multiplied with as many keys in any company (docs/adr/0015). Tokens of several sessions, one of each, are
one span if they attend to as many rows and their slots follow one another. Every token is written to its own row, but a
tree is attended to path by path, each path in the rows where it would stand as a chain (`paths`): a call does so in a
copy of the slot's rows for each of its paths, or, for a single path, in the slot itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specsplit.core.record import record
from specsplit.model.attention.head_work import HeadWork
from specsplit.model.attention.masks import MaskFunction, as_bias, evaluate_mask, level_bias, ramp_of
from specsplit.model.attention.paths import MOST_ROWS, PathBatch, PathLimits, cut_into_paths, cut_into_spans, end_row
from specsplit.sampling.tree_attention import is_chain
from specsplit.sampling.tree_attention import positions as tree_positions


@record
class SequenceInput:
    """One session's share of a step.

    `token_ids` are written to the slot's rows behind those that exist. `parents` covers every row behind `base_length`:
    first the rows already there (earlier levels of a tree), then `token_ids`; item i is the index of an earlier row
    behind `base_length`, or -1 for the last committed token. None means a chain right behind `base_length`.
    Logits are wanted for the last `num_logits` tokens. `head_request` goes with them if they stay in another process,
    or says what a GPU looks for in them (`row_search`); other heads take no notice.
    """

    slot: int
    base_length: int
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: int = 1
    head_request: HeadWork | None = None

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

    `token_ids`, `position_ids` [1, T]; `logit_rows` [sum of num_logits].
    `spans` [E, 13] and `tables` (flat) are on the CPU. A span is (slot, start, stop, first_row, end_row, new, offset,
    width, num_slots, num_paths, depth, table, per_call): tokens of the step, the rows they are written to, the rows
    attended to, whether rows behind its own come into sight with it (these are cleared, since what another session left
    may be infinite), where its bias begins, and the query tokens, filled up. If `num_slots` is not 1, it is one token
    for each of so many slots from `slot` on. A tree has one span for each number of rows attended to, each with all its
    tokens. Such a span has `num_paths` paths: `tables` holds from `table` on the tokens of each [num_paths, depth],
    then the query tokens of each [num_paths, width]; `per_call` of them share a call.
    Unless the step is a chain, `tables` begins with the slot [T] and the row [T] of each token; if there is a tree, the
    place [T] of each token's result among those of all spans follows.
    `biases` holds, per kind of mask, flat biases of 0 or -inf: [width, end_row] for a span, as many for each path or
    slot.
    """

    token_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    spans: Tensor
    tables: Tensor
    biases: tuple[Tensor, ...]


@dataclass(slots=True)
class _Span:
    """Consecutive tokens of the step: of a chain, of a level, a tree with some of its paths, or one of each slot."""

    slot: int
    start: int
    stop: int
    first_row: int
    end_row: int
    is_new: bool
    """Whether it is the first to attend to some of its rows."""
    level: SequenceInput | None = None
    """Set for a level: its rows stand where the tree's rows stand, and see their ancestors only."""
    paths: PathBatch | None = None
    """Set for a tree: the queries are those of its paths."""
    other_rows: list[int] = field(default_factory=list[int])
    """The rows of other sessions' tokens, in the slots that follow."""

    @property
    def num_slots(self) -> int:
        return 1 + len(self.other_rows)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        return self.slot, self.start, self.stop, self.first_row, self.end_row, self.is_new


@dataclass(slots=True)
class _Step:
    """The lists from which a step's tensors are made."""

    limits: PathLimits | None
    can_join: bool
    span_rows: int
    token_ids: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    logit_rows: list[int] = field(default_factory=list[int])
    slots: list[int] = field(default_factory=list[int])
    rows: list[int] = field(default_factory=list[int])
    spans: list[_Span] = field(default_factory=list[_Span])

    def add(self, sequence: SequenceInput) -> None:
        start, count = len(self.token_ids), len(sequence.token_ids)
        self.token_ids.extend(sequence.token_ids)
        if sequence.is_chain:
            self._add_chain(sequence, start)
        elif self.limits is not None and sequence.num_tree_rows == count:
            self._add_tree(sequence, start, self.limits)
        else:
            self._add_level(sequence, start)
        self.logit_rows.extend(range(start + count - sequence.num_logits, start + count))
        stop_row = sequence.base_length + sequence.num_tree_rows
        self.slots.extend([sequence.slot] * count)
        self.rows.extend(range(stop_row - count, stop_row))

    def _add_chain(self, sequence: SequenceInput, start: int) -> None:
        last_row = sequence.base_length + sequence.num_tree_rows
        first_row = last_row - len(sequence.token_ids)
        if self.can_join and last_row - first_row == 1 and self._join(sequence.slot, first_row):
            self.positions.append(first_row)
            return
        for first, stop in cut_into_spans(first_row, last_row, self.span_rows):
            begin, end = start + first - first_row, end_row(stop - 1)
            is_new = _brings_rows_into_sight(first)
            self.spans.append(_Span(sequence.slot, begin, begin + stop - first, first, end, is_new))
        self.positions.extend(range(first_row, last_row))

    def _join(self, slot: int, row: int) -> bool:
        """Add one token to the span before it if that holds tokens of the slots before this one; return whether."""
        last = self.spans[-1] if self.spans else None
        if (
            last is None
            or last.num_tokens != last.num_slots
            or last.slot + last.num_slots != slot
            or last.end_row != end_row(row)
            or last.level is not None
            or last.paths is not None
            or last.is_new
            or _brings_rows_into_sight(row)
        ):
            return False
        last.stop += 1
        last.other_rows.append(row)
        return True

    def _add_level(self, sequence: SequenceInput, start: int) -> None:
        """Add a level of a tree whose earlier rows are in the slot, every node on its own row."""
        assert sequence.parents is not None
        count, base = len(sequence.token_ids), sequence.base_length
        last_row = base + len(sequence.parents)
        end = end_row(last_row - 1)
        is_new = base == 0 or end_row(base - 1) < end
        self.spans.append(_Span(sequence.slot, start, start + count, last_row - count, end, is_new, sequence))
        self.positions.extend(tree_positions(base, sequence.parents)[-count:])

    def _add_tree(self, sequence: SequenceInput, start: int, limits: PathLimits) -> None:
        assert sequence.parents is not None
        base, stop = sequence.base_length, start + len(sequence.token_ids)
        sight = end_row(base - 1) if base else 0
        for batch in cut_into_paths(sequence.parents, base, limits):
            is_new = sight < batch.end_row
            self.spans.append(_Span(sequence.slot, start, stop, base, batch.end_row, is_new, paths=batch))
        self.positions.extend(tree_positions(base, sequence.parents))


def _brings_rows_into_sight(row: int) -> bool:
    """Return whether a token on this row attends to more rows than the one before it."""
    return row == 0 or end_row(row - 1) < end_row(row)


def in_common_spans(sequences: Sequence[SequenceInput]) -> list[int]:
    """Return an order of the sequences in which as many as possible share a span."""
    return sorted(range(len(sequences)), key=lambda place: _company(sequences[place]))


def _company(sequence: SequenceInput) -> tuple[bool, int, int]:
    """Return a key that is nearly the same for tokens that may share a span."""
    last_row = sequence.base_length + sequence.num_tree_rows - 1
    return len(sequence.token_ids) > 1, end_row(last_row), sequence.slot


def _tables(step: _Step) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return per span (num_paths, depth, table), and the tables of all."""
    spans, num_tokens = step.spans, len(step.token_ids)
    if all(span.paths is None for span in spans):
        is_alone = len(spans) == 1 and spans[0].num_slots == 1
        return [(0, 0, 0)] * len(spans), [] if is_alone else [*step.slots, *step.rows]
    places, tables, shapes = [0] * num_tokens, list[int](), list[tuple[int, int, int]]()
    num_results = 0
    for span in spans:
        if span.paths is None:
            shapes.append((0, 0, 0))
            queries = list(range(span.start, span.stop))
        else:
            nodes, queries = span.paths.nodes, [span.start + node for path in span.paths.queries for node in path]
            shapes.append((len(nodes), len(nodes[0]), 3 * num_tokens + len(tables)))
            tables.extend([span.start + node for path in nodes for node in path])
            tables.extend(queries)
        for place, token in enumerate(queries, num_results):
            places[token] = place
        num_results += len(queries)
    return shapes, [*step.slots, *step.rows, *places, *tables]


class MetadataBuilder:
    """Lays out the steps of one model, whose layers share a few kinds of masks (None = plainly causal).

    `capacity` is that of a slot. With `limits` a tree is attended to path by path, for the same bits in any tree;
    without them it is one span, which takes fewer calls. With `can_join` tokens of several slots may be one span.
    """

    def __init__(
        self,
        masks: Sequence[MaskFunction | None],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        limits: PathLimits | None,
        can_join: bool = False,
    ) -> None:
        self._masks, self._capacity, self._limits, self._can_join = masks, capacity, limits, can_join
        self.span_rows = MOST_ROWS
        """Tokens of a chain that share a call, at most."""
        self._dtype, self._device = dtype, device
        found = [ramp_of(mask, capacity) for mask in masks]
        self._ramps = [None if ramp is None else ramp.to(device=device, dtype=dtype) for ramp in found]
        self._one_token = _OneToken([ramp for ramp in self._ramps if ramp is not None], capacity)
        self._has_ramps = len(masks) > 0 and all(ramp is not None for ramp in self._ramps)

    def build(self, sequences: Sequence[SequenceInput]) -> AttentionMetadata:
        """Lay out a step. What one token alone gets is valid until the next call."""
        if len(sequences) == 1 and self._has_ramps and self._device.type == "cpu":
            sequence = sequences[0]
            if len(sequence.token_ids) == 1 and sequence.num_logits == 1 and sequence.is_chain:
                return self._one_token.updated(sequence)
        step = _Step(self._limits, self._can_join, self.span_rows)
        for sequence in sequences:
            step.add(sequence)
        offsets, biases = self._biases(step.spans)
        shapes, tables = _tables(step)
        rows = [
            (*span.numbers, offset, self._width(span), span.num_slots, *shape, self._paths_per_call(span))
            for span, offset, shape in zip(step.spans, offsets, shapes, strict=True)
        ]
        return AttentionMetadata(
            token_ids=_integers([step.token_ids]).to(self._device),
            position_ids=_integers([step.positions]).to(self._device),
            logit_rows=_integers(step.logit_rows).to(self._device),
            spans=_integers(rows),
            tables=_integers(tables),
            biases=biases,
        )

    def _paths_per_call(self, span: _Span) -> int:
        return 1 if self._limits is None else self._limits.paths_per_call(span.end_row)

    def _width(self, span: _Span) -> int:
        """Return the query tokens of a span or of each of its paths, filled up."""
        if span.paths is not None:
            return len(span.paths.queries[0])
        if span.other_rows:
            return 1
        return span.num_tokens if self._limits is None else self._limits.filled(span.num_tokens)

    def _num_rows(self, span: _Span) -> int:
        """Return the rows of a span's bias."""
        return self._width(span) * (span.num_slots if span.paths is None else len(span.paths.queries))

    def _biases(self, spans: Sequence[_Span]) -> tuple[list[int], tuple[Tensor, ...]]:
        """Return where each span's bias begins, and the flat biases of each kind."""
        if self._has_ramps and all(span.num_tokens == 1 and span.level is None for span in spans):
            # A token sees a part of the ramp, so the ramp itself is the bias of all.
            ramps = tuple([ramp for ramp in self._ramps if ramp is not None])
            return [self._capacity - 1 - span.first_row for span in spans], ramps
        offsets = np.cumsum([0] + [self._num_rows(span) * span.end_row for span in spans]).tolist()
        return offsets[:-1], tuple([self._flat(kind, spans) for kind in range(len(self._masks))])

    def _flat(self, kind: int, spans: Sequence[_Span]) -> Tensor:
        parts = [self._bias(kind, span).reshape(-1) for span in spans]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _bias(self, kind: int, span: _Span) -> Tensor:
        """Return the bias [rows, end_row] of one span; rows that only fill it up see everything."""
        count, ramp, mask = span.num_tokens, self._ramps[kind], self._masks[kind]
        if span.level is not None:
            base, parents = span.level.base_length, span.level.parents
            assert parents is not None, "a level names its ancestors"
            shape = self._num_rows(span), span.end_row
            return level_bias(base, parents, count, mask, shape).to(device=self._device, dtype=self._dtype)
        if ramp is not None and span.paths is None and not span.other_rows:
            # Row by row the ramp moves on by one; the last row's begins first.
            begin = self._capacity - span.first_row - count
            bias = ramp.as_strided((count, span.end_row), (1, 1), begin).flip(0)
        else:
            bias = self._bias_at(kind, _positions(span), span.end_row)
        missing = self._num_rows(span) - len(bias)
        return F.pad(bias, (0, 0, 0, missing)) if missing else bias

    def _bias_at(self, kind: int, positions: Sequence[int], num_rows: int) -> Tensor:
        """Return the bias [t, num_rows] of tokens at any positions of a chain."""
        ramp, mask = self._ramps[kind], self._masks[kind]
        if ramp is not None:
            begins = ramp.as_strided((self._capacity, num_rows), (1, 1))
            return begins.index_select(0, self._capacity - 1 - _integers(positions).to(self._device))
        assert mask is not None
        bias = as_bias(evaluate_mask(mask, torch.tensor(positions), torch.arange(num_rows)))
        return bias.to(device=self._device, dtype=self._dtype)


class _OneToken:
    """The metadata of one token at the end of a chain, as in plain decoding, in memory that stays.

    Laying it out anew takes four times as long. It serves a model on the CPU, one step at a time.
    """

    def __init__(self, ramps: Sequence[Tensor], capacity: int) -> None:
        # Arrays and tensors share their memory: an update of the numbers below is an update of the metadata.
        token_ids, position_ids = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
        spans = np.array([[0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1]], np.int64)
        self._token_ids, self._position_ids, self._spans = token_ids[0], position_ids[0], spans[0]
        self._capacity = capacity
        self._metadata = AttentionMetadata(
            token_ids=torch.from_numpy(token_ids),
            position_ids=torch.from_numpy(position_ids),
            logit_rows=_integers([0]),
            spans=torch.from_numpy(spans),
            tables=torch.zeros(0, dtype=torch.int64),
            biases=tuple(ramps),
        )

    def updated(self, sequence: SequenceInput) -> AttentionMetadata:
        row = sequence.base_length + sequence.num_tree_rows - 1
        self._token_ids[0] = sequence.token_ids[0]
        self._position_ids[0] = row  # along a chain a row's number is its position
        spans = self._spans
        spans[0], spans[3], spans[4], spans[6] = sequence.slot, row, end_row(row), self._capacity - 1 - row
        spans[5] = _brings_rows_into_sight(row)
        return self._metadata


def _positions(span: _Span) -> Sequence[int]:
    """Return the position of each row of a span's bias."""
    if span.other_rows:
        return [span.first_row, *span.other_rows]
    if span.paths is None:
        return range(span.first_row, span.first_row + span.num_tokens)
    depths = {node: depth for path in span.paths.nodes for depth, node in reversed([*enumerate(path)])}
    return [span.first_row + depths[node] for path in span.paths.queries for node in path]


def _integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Return int64 values by way of numpy, which takes a fraction of torch's time for a few."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
