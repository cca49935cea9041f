"""Makes long answers a part at a time, so that others go on meanwhile: log-probabilities may be many megabytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")
SLICE = 256
"""Tokens whose log-probabilities are made, or become JSON, in one go: some milliseconds with 20 others each."""
MAX_S = 0.005
"""Seconds after which other tasks have a turn."""
# Made once: json.dumps makes one for every value.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items in slices, at least one, which may be empty."""
    for start in range(0, max(1, len(items)), SLICE):
        yield items[start : start + SLICE]


async def to_json(answer: dict[str, Any]) -> str:
    """Return an answer as JSON; other tasks run meanwhile."""
    pieces: list[str] = []
    began_s = time.perf_counter()
    for piece in _pieces(answer, 0):
        pieces.append(piece)
        if time.perf_counter() - began_s > MAX_S:
            await asyncio.sleep(0)
            began_s = time.perf_counter()
    return "".join(pieces)


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield the JSON of a value: of the answer, its choices and their log-probabilities in pieces."""
    if isinstance(value, dict) and depth < 4:  # answer 0, choices 1, choice 2, logprobs 3, its lists 4
        lead = "{"
        for name, item in cast("dict[str, Any]", value).items():
            yield f"{lead}{_encode(name)}:"
            yield from _pieces(item, depth + 1)
            lead = ","
        yield "}" if value else "{}"
    elif isinstance(value, list) and value:
        lead, items = "[", cast("list[Any]", value)
        for part in slices(items) if depth > 1 else zip(items, strict=True):
            yield lead
            if depth > 1:
                yield _encode(part)[1:-1]
            else:
                yield from _pieces(part[0], depth + 1)
            lead = ","
        yield "]"
    else:
        yield _encode(value)
