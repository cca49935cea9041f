"""The models that are measured and how they are loaded: the same for every system of a run. Knows no library."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft, each "embedded", a folder or a hub id; without a draft decoding is plain."""

    target: str = EMBEDDED
    draft: str | None = EMBEDDED
    dtype: str = "fp32"
    device: str = "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Return the pair in JSON types."""
        return asdict(self)


def chosen_pair(pair: str | None, target: str | None, draft: str | None, dtype: str, device: str) -> Pair:
    """Return the pair that options name: the embedded one, or a target with or without a draft.

    Raises:
        InvalidRequest: both ways at once, or an unknown pair.
    """
    if pair not in (None, EMBEDDED):
        raise InvalidRequest(f"There is no pair {pair!r}; write embedded, or name models with --target.", param="pair")
    if pair is not None and (target or draft):
        raise InvalidRequest("--pair embedded and --target or --draft contradict; leave one out.", param="pair")
    if target is None:
        return Pair(EMBEDDED, draft or EMBEDDED, dtype, device)
    return Pair(target, draft, dtype, device)


def is_inflated(source: str) -> bool:
    """Return whether the configuration in a folder says that the model was inflated (see research/inflate.py)."""
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any("inflated" in name for name in config)
