"""What is measured: tasks, the systems that do them, and what one system's run on one task gives.

Knows no model and no library; the adapters under `peers/` implement System.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from specsplit.core.types import SamplingParams
from specsplit.orchestrator.records import Result


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to be continued by exactly `num_tokens` tokens, end-of-sequence tokens being tokens like any other."""

    id: str
    prompt_ids: tuple[int, ...]
    num_tokens: int
    sampling: SamplingParams = field(default=SamplingParams())
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One system's run on one task, the model loaded and the prompt encoded beforehand."""

    wall_s: float
    """From the prompt's ids to the last new token; for a bare forward, its decoding steps only."""
    token_ids: tuple[int, ...] | None
    """The new tokens; None where the system generates none."""
    decode_s: float | None = None
    """From the first to the last new token, where the system tells."""
    result: Result | None = None
    """All that our own systems tell."""


class System(Protocol):
    """Something that continues prompts, loaded and ready."""

    @property
    def name(self) -> str: ...

    def generate(self, task: Task) -> Sample:
        """Do the task and time it."""
        ...
