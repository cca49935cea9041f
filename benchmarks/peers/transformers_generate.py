"""transformers' `generate` with its KV cache and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.pair import Pair

WAYS: dict[str, Callable[[Pair], dict[str, Any]]] = {"generate": lambda pair: {}}
"""Options of `generate`, by the name of the way."""
