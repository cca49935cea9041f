"""How many tokens of a prompt are attended to in one call here, so that a token's bits do not follow from their number.

Many tokens in a call read each key once for all of them: behind 2,000 tokens 512 in a call take three quarters of what
60 do. But from 64 on, in half precision, torch's kernel multiplies with packed keys on some processors, in another
order of sums. So it is tried on the model's shapes, once for each machine; the outcome is in the user's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsplit.model.attention.function import LayerSpec, attend_rows
from specsplit.model.attention.paths import MOST_ROWS, end_row
from specsplit.model.attention.stacking import are_stacked
from specsplit.model.exactness import fingerprint
from specsplit.model.kernels.library import kernel_digest
from specsplit.model.proofs import Proofs, digest
from specsplit.model.threads import one_thread

_FILE = "spans.json"
_VERSION = 1
"""Changes with what is tried."""
_FIRST_ROWS = ((512, 640, 768, 896), (2048,))
"""The first rows of spans of 128 tokens, and of 512. Torch attends to 512 rows at a time, so these end in each way."""
_WIDTHS = (64, 100, 128, 188, 192, 508, 512)
"""Tokens of the calls that are tried; torch takes larger parts of a product from 192 query rows on, and from 768."""
_FEW = (4, 8, 56, 60)
"""Tokens of calls whose products are the same for any number of rows (docs/adr/0015), in turn."""


@dataclass(frozen=True, slots=True, order=True)
class _Shape:
    """The shape of one layer's products; one KV head stands for all, which are computed apart."""

    group: int
    """Query heads per KV head."""
    head_dim: int
    has_sinks: bool


def span_rows(layers: Sequence[LayerSpec], dtype: torch.dtype, context: int) -> int:
    """Return the most tokens of a prompt for which a call gives each the bits that it has alone; MOST_ROWS at least."""
    widest = MOST_ROWS
    if layers and kernel_digest():
        return end_row(_FIRST_ROWS[-1][-1]) - _FIRST_ROWS[-1][-1]  # a row is computed by itself
    # By the formula eight rows are multiplied at a time, however many there are.
    if not layers or any(layer.has_formula for layer in layers):
        return widest
    shapes = sorted({_Shape(layer.group, layer.key_shape.head_dim, layer.sinks is not None) for layer in layers})
    known = Proofs(_FILE)
    for first_rows in _FIRST_ROWS:
        if context < end_row(first_rows[0]):
            return widest
        key = digest(fingerprint(dtype), _VERSION, first_rows, shapes)
        outcome = known.get(key)
        if outcome is None:
            outcome = _objection(shapes, first_rows, dtype)
            known.put(key, outcome)
        if outcome:
            return widest
        widest = end_row(first_rows[0]) - first_rows[0]
    return widest


def _objection(shapes: Sequence[_Shape], first_rows: Sequence[int], dtype: torch.dtype) -> str:
    """Return why spans that begin on these rows may not be wide; "" if they may."""
    try:
        # With one thread torch packs keys if it ever does.
        with torch.inference_mode(), one_thread():
            for shape in shapes:
                for first_row in (*first_rows, *_where_heads_part(shape, first_rows[0], dtype)):
                    if not _is_same(shape, first_row, dtype):
                        return f"a row differs behind {first_row} others in a wide call of {shape}"
    except RuntimeError as error:
        return f"the kernel refuses wide calls: {error}"
    return ""


def _where_heads_part(shape: _Shape, first_row: int, dtype: torch.dtype) -> Iterator[int]:
    """Yield the first row from which on the heads of such a span are apart, if they are stacked before."""
    width = end_row(first_row) - first_row
    row = first_row
    while are_stacked(shape.group, width, row + width, dtype.itemsize):
        row += width
    if row > first_row:
        yield row


def _is_same(shape: _Shape, first_row: int, dtype: torch.dtype) -> bool:
    """Return whether calls of many tokens, from this row on, give each of them the bits that a few have."""
    end = end_row(first_row)
    count, num_heads, head_dim = end - first_row, shape.group, shape.head_dim
    generator = torch.Generator().manual_seed(3)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    sight = drawn(1, 1, end, head_dim), drawn(1, 1, end, head_dim)
    queries = drawn(count, num_heads, head_dim).transpose(0, 1)  # as a model has them
    is_hidden = torch.arange(end) > torch.arange(first_row, end)[:, None]
    biases = torch.zeros(count, end).masked_fill(is_hidden, -torch.inf).to(dtype)
    scale = head_dim**-0.5, 0.0, drawn(num_heads) if shape.has_sinks else None

    def attended(start: int, num_rows: int) -> Tensor:
        return attend_rows(queries[:, start : start + num_rows], sight, biases[None, start : start + num_rows], scale)

    parts: list[Tensor] = []
    start = 0
    while start < count:
        parts.append(attended(start, min(_FEW[len(parts) % len(_FEW)], count - start)))
        start += len(parts[-1])
    truth = torch.cat(parts)
    calls = [(begin, num) for num in _WIDTHS if num <= count for begin in {0, count - num}]
    alone = [(row, 1) for row in (0, count // 3, count - 1)]
    return all(torch.equal(attended(begin, num), truth[begin : begin + num]) for begin, num in calls + alone)
