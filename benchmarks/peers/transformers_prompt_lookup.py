"""transformers' prompt lookup: drafts copied from where the last tokens stood before, without a draft model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.pair import Pair

NUM_TOKENS = (4, 10)


def _copies(count: int, pair: Pair) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": count}


WAYS: dict[str, Callable[[Pair], dict[str, Any]]] = {f"lookup-{count}": partial(_copies, count) for count in NUM_TOKENS}
"""Options of `generate`, by the name of the way: with short and with long copies."""
