"""The spans of a step, as the attention function reads them from its tensors, and slots of labels to play it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsplit.model.attention.metadata import AttentionMetadata, SequenceInput

NODES = 10_000
"""Labels: a committed token has its position, a node of the tree its number behind this one."""
FREE, CLEARED = -1, -2


@dataclass(frozen=True)
class Span:
    """One span of a step, as the attention function reads it."""

    slot: int
    start: int
    stop: int
    first_row: int
    end_row: int
    is_new: int
    offset: int
    width: int
    num_slots: int
    num_paths: int
    depth: int
    table: int
    per_call: int


def spans_of(metadata: AttentionMetadata) -> list[Span]:
    return [Span(*numbers) for numbers in metadata.spans.tolist()]


def tables_of(metadata: AttentionMetadata, span: Span) -> tuple[Tensor, Tensor]:
    """Return the tokens of each path [num_paths, depth], and the query tokens of each [num_paths, width]."""
    nodes, queries, _ = metadata.tables[span.table :].split(
        [
            span.num_paths * span.depth,
            span.num_paths * span.width,
            len(metadata.tables) - span.table - span.num_paths * (span.depth + span.width),
        ]
    )
    return nodes.view(span.num_paths, span.depth), queries.view(span.num_paths, span.width)


def bias_of(metadata: AttentionMetadata, span: Span, kind: int) -> Tensor:
    """Return a span's bias [t, end_row], of all paths one after the other, as the attention function reads it."""
    rows = span.width * max(span.num_slots, span.num_paths)
    bias = metadata.biases[kind].narrow(0, span.offset, rows * span.end_row).view(rows, span.end_row)
    assert set(bias.unique().tolist()) <= {0.0, float("-inf")}
    if span.num_paths:
        return bias
    count = span.stop - span.start
    assert (bias[count:] == 0).all(), "a row that sees nothing is no number"
    return bias[:count]


class LabelledSlots:
    """Slots that hold labels, as a step finds them and changes them."""

    def __init__(self, step: Sequence[SequenceInput], capacity: int) -> None:
        self.rows: dict[int, Tensor] = {}
        for entry in step:
            rows = torch.full((capacity,), FREE)
            base, num_earlier = entry.base_length, entry.num_tree_rows - len(entry.token_ids)
            rows[:base] = torch.arange(base)
            rows[base : base + num_earlier] = NODES + torch.arange(num_earlier)
            self.rows[entry.slot] = rows

    def views(self, metadata: AttentionMetadata, labels: Tensor, kind: int) -> list[tuple[Tensor, Tensor]]:
        """Play the step; return for each of its tokens the labels that it sees, and their rows."""
        views: list[tuple[Tensor, Tensor]] = []
        self._write(metadata, labels)
        for span in spans_of(metadata):
            bias, rows = bias_of(metadata, span, kind), self.rows[span.slot]
            if span.num_slots > 1:
                views.extend(_seen_by(self.rows[span.slot + place], row) for place, row in enumerate(bias))
                continue
            if not span.num_paths:
                views.extend(_seen_by(rows, row) for row in bias)
                continue
            for path, biases in zip(tables_of(metadata, span)[0], bias.split(span.width), strict=True):
                as_chain = rows[: span.end_row].clone()
                as_chain[span.first_row : span.first_row + span.depth] = labels[path]
                views.extend(_seen_by(as_chain, row) for row in biases)
        places = metadata.tables[2 * len(labels) :][: len(labels)].tolist()
        return [views[place] for place in places] if places else views

    def _write(self, metadata: AttentionMetadata, labels: Tensor) -> None:
        """Clear what comes into sight, then write all tokens to their rows."""
        spans = spans_of(metadata)
        for span in spans:
            if span.is_new:
                self.rows[span.slot][span.first_row + span.stop - span.start : span.end_row] = CLEARED
        if len(spans) == 1 and spans[0].num_slots == 1:
            self.rows[spans[0].slot][spans[0].first_row :][: len(labels)] = labels
            return
        slots, rows = metadata.tables[: len(labels)].tolist(), metadata.tables[len(labels) :][: len(labels)].tolist()
        for slot, row, label in zip(slots, rows, labels.tolist(), strict=True):
            self.rows[slot][row] = label


def _seen_by(labels: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    rows = (bias == 0).nonzero().flatten()
    return labels[rows].clone(), rows
