"""Whether the query heads of one KV head are rows of one product when many tokens are attended to in one call.

From 768 rows on torch's kernel for CPUs takes larger parts of a product, which are worth a bias for each head as long
as that is not large. Else the heads are apart, and share the bias.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def _are_stacked(group: int, num_tokens: int, num_rows: int, item_bytes: int) -> bool:
    """Return whether they are, for `group` heads, tokens of a span, rows attended to and bytes of a bias' entry."""
    num_queries = group * num_tokens
    # Up to 60 tokens a call's products are those of any number of rows (paths.MOST_ROWS), so heads stay apart.
    return num_tokens > 60 and num_queries >= 768 and num_queries * num_rows * item_bytes <= 16 << 20


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, not gone: docs/adr/0002
    are_stacked: Callable[[int, int, int, int], bool] = torch.jit.script(_are_stacked)
