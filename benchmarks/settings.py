"""The settings that `run` and `sweep` share. Knows no process and no file."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from benchmarks import workloads
from benchmarks.pair import Pair, is_inflated
from benchmarks.peers.modes import Shape
from benchmarks.statistics import BOOTSTRAP_SEED, CONFIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Models, trees, addresses and sizes; systems are made from them."""

    workload: str = workloads.CODE
    sha256: str | None = None
    num_prompts: int | None = 6
    num_new_tokens: int = 96
    num_rounds: int = 5
    threads: int = 1
    seed: int = 0
    is_inflated: bool = False
    """Whether to call the target inflated even if its config does not."""
    pair: Pair = field(default=Pair())
    shape: Shape = field(default=Shape())
    lookup: bool = True
    """Whether our own systems' trees hold lookup's nodes too."""
    target_address: str | None = None
    draft_address: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON types."""
        names = [field.name for field in fields(Setup) if field.name not in ("sha256", "pair", "shape")]
        return {
            **{name: getattr(self, name) for name in names},
            "is_inflated": self.is_inflated or is_inflated(self.pair.target),
            **self.pair.to_dict(),
            **self.shape.to_dict(),
            "bootstrap_seed": BOOTSTRAP_SEED,
            "confidence": CONFIDENCE,
        }
