"""The settings of `calibration`: modes, temperatures, prompts and the pair."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from benchmarks import workloads
from benchmarks.research.resampling import BOOTSTRAP_SEED, CONFIDENCE
from benchmarks.settings import Shape
from specsplit.core.defaults import DRAFTLESS, EMBEDDED, Mode
from specsplit.core.errors import InvalidRequest

DEFAULT_PROMPTS = 24
MODES = tuple(mode for mode in get_args(Mode) if mode not in DRAFTLESS)


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Settings of the study: modes, models and sizes."""

    modes: tuple[str, ...] = ("overlap",)
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    num_prompts: int = DEFAULT_PROMPTS
    num_new_tokens: int = 96
    seed: int = 0
    """Seed of the first prompt; the next ones have the next seeds."""
    threads: int = 1
    target: str = EMBEDDED
    draft: str = EMBEDDED
    shape: Shape = field(default=Shape())

    @property
    def num_first_prompts(self) -> int:
        """Prompts of the first half."""
        return self.num_prompts // 2

    def check(self) -> None:
        """Refuse what cannot be studied.

        Raises:
            InvalidRequest: a mode is none, or asks no draft; a mode or a temperature is named twice.
        """
        for mode in self.modes:
            if mode not in MODES:
                raise InvalidRequest(f"There is no mode {mode!r} with a draft; there are {', '.join(MODES)}.")
        for option, values in (("--modes", self.modes), ("--temperature", self.temperatures)):
            if not values or len(set(values)) < len(values):
                raise InvalidRequest(f"{option} must name at least one value, and each once.")

    def to_dict(self) -> dict[str, object]:
        """Return the settings in JSON types."""
        return {
            "modes": list(self.modes),
            "temperatures": list(self.temperatures),
            "workload": workloads.CODE,
            "num_prompts": self.num_prompts,
            "num_new_tokens": self.num_new_tokens,
            "seed": self.seed,
            "threads": self.threads,
            "target": self.target,
            "draft": self.draft,
            "dtype": "fp32",
            "nodes": self.shape.nodes,
            "depth": self.shape.depth,
            "branching": self.shape.branching,
            "bootstrap_seed": BOOTSTRAP_SEED,
            "confidence": CONFIDENCE,
        }
