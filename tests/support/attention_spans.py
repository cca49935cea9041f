"""The spans of a step, read from its tensors as the attention function reads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specsplit.model.attention.metadata import AttentionMetadata


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
    rows = span.width * max(1, span.num_paths)
    bias = metadata.biases[kind].narrow(0, span.offset, rows * span.end_row).view(rows, span.end_row)
    assert set(bias.unique().tolist()) <= {0.0, float("-inf")}
    if span.num_paths:
        return bias
    count = span.stop - span.start
    assert (bias[count:] == 0).all(), "a row that sees nothing is no number"
    return bias[:count]
