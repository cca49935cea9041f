"""How many tokens of a prompt are attended to in one call here, so that a row's bits do not follow from their number.

Many tokens in a call read each key once for all of them: behind 2,000 tokens 512 in a call take three quarters of what
60 do. But from 64 on, in half precision, torch's kernel multiplies with packed keys on some processors, in another
order of sums. So it is tried on the shapes of the model, once for each machine; the outcome is in the user's cache.

Legend: H KV heads, G query heads per KV head, D head size, S rows attended to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsplit.model.attention.function import LayerSpec, attend_rows
from specsplit.model.attention.paths import MOST_ROWS, end_row
from specsplit.model.exactness import fingerprint
from specsplit.model.proofs import Proofs, digest

_FILE = "widths.json"
_FIRST_ROWS = (512, 2048)
"""From these rows on 128 tokens, and 512, attend to as many rows as one another."""
_NUMS_ROWS = (64, 68, 100, 124, 128, 188, 192, 256, 508, 512)
"""Torch takes other parts of a product from 192 on."""
_TRUTH = (4, 8, 56, 60)
"""Tokens of calls whose products are the same for any number of rows (docs/adr/0015), in turn."""


def span_rows(layers: Sequence[LayerSpec], dtype: torch.dtype, context: int) -> int:
    """Return the most tokens of a prompt for which a call gives each the bits that it has alone; MOST_ROWS at least."""
    widest = MOST_ROWS
    # By the formula eight rows are multiplied at a time, however many there are.
    if any(layer.has_formula for layer in layers):
        return widest
    shapes = {(layer.key_shape.num_heads, layer.group, layer.key_shape.head_dim) for layer in layers}
    known = Proofs(_FILE)
    for first_row in _FIRST_ROWS:
        if not shapes or context < end_row(first_row):
            return widest
        key = digest(fingerprint(dtype), "spans", first_row, sorted(shapes))
        found = known.get(key)
        if found is None:
            found = "" if all(_is_same(*shape, first_row, dtype) for shape in shapes) else "differs"
            known.put(key, found)
        if found:
            return widest
        widest = end_row(first_row) - first_row
    return widest


@torch.inference_mode()
def _is_same(num_heads: int, group: int, head_dim: int, first_row: int, dtype: torch.dtype) -> bool:
    """Return whether calls of many tokens, from this row on, give each of them the bits that a few have."""
    count, end = end_row(first_row) - first_row, end_row(first_row)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sight = drawn(1, num_heads, end, head_dim), drawn(1, num_heads, end, head_dim)
    queries = drawn(num_heads * group, count, head_dim)
    is_hidden = torch.arange(end) > torch.arange(first_row, end)[:, None]
    biases = torch.zeros(count, end).masked_fill(is_hidden, -torch.inf).to(dtype)

    def attended(start: int, num_rows: int) -> Tensor:
        bias = biases[None, start : start + num_rows].contiguous()
        return attend_rows(queries[:, start : start + num_rows], sight, bias, (head_dim**-0.5, 0.0, None))

    parts: list[Tensor] = []
    start = 0
    while start < count:
        parts.append(attended(start, min(_TRUTH[len(parts) % len(_TRUTH)], count - start)))
        start += len(parts[-1])
    truth = torch.cat(parts)
    calls = [(begin, num) for num in _NUMS_ROWS if num <= count for begin in {0, count - num}]
    alone = [(row, 1) for row in (0, count // 3, count - 1)]
    return all(torch.equal(attended(begin, num), truth[begin : begin + num]) for begin, num in calls + alone)
