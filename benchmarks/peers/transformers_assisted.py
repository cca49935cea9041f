"""transformers' assisted generation with the same pair: as it comes, and with a constant number of drafted tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.pair import Pair
from benchmarks.peers.transformers_model import load

NUM_CONSTANT_TOKENS = 4


def _as_it_comes(pair: Pair) -> dict[str, Any]:
    return {"assistant_model": load("draft", pair)}


def _constant(pair: Pair) -> dict[str, Any]:
    draft = load("draft", pair)  # its own: the options live in the draft's generation config
    draft.generation_config.num_assistant_tokens = NUM_CONSTANT_TOKENS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0
    return {"assistant_model": draft}


WAYS: dict[str, Callable[[Pair], dict[str, Any]]] = {"assisted": _as_it_comes, "assisted-constant": _constant}
"""Options of `generate`, by the name of the way."""
