"""The longest context that a model was made for, from values of its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def longest_context(limit: int | None, rope: Mapping[str, Any]) -> int | None:
    """Return the longest context of a model with this max_position_embeddings; None if its config says none.

    YaRN goes as far as its factor stretches the original length, which a config may say without a higher limit.
    """
    factor, kind = rope.get("factor"), rope.get("rope_type", rope.get("type"))
    original = rope.get("original_max_position_embeddings") or limit
    if limit is None or kind != "yarn" or not isinstance(factor, int | float) or not isinstance(original, int | float):
        return limit
    return max(limit, int(factor * original))
