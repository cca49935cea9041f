"""The things that are measured: tasks, the systems that do them, and what one system's run on one task gives.

Knows no model and no library; the adapters under `peers/` implement System.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from specsplit.core.types import SamplingParams
from specsplit.orchestrator.request import Result

Arrivals = tuple[tuple[float, int], ...]
"""(seconds since the start, new tokens) of everything that a reader would have seen arrive, in order."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to be continued by exactly `num_tokens` tokens, end-of-sequence tokens being tokens like any other."""

    id: str
    prompt_ids: tuple[int, ...]
    num_tokens: int
    sampling: SamplingParams = field(default=SamplingParams())
    seed: int = 0
    text: str | None = None
    """The text that `prompt_ids` encode, if it was one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One system's run on one task, the model loaded and the prompt encoded beforehand."""

    wall_s: float
    """From the prompt's ids to the last new token; for a bare forward, its decoding steps only."""
    token_ids: tuple[int, ...] | None
    """The new tokens; None where the system generates none, or does not tell them."""
    decode_s: float | None = None
    """From the first to the last new token, where the system tells."""
    result: Result | None = None
    """All that our own systems tell."""
    arrivals: Arrivals = ()
    """Empty where the system does not tell."""
    num_tokens: int | None = None
    """New tokens, where `token_ids` does not tell or they are not the task's number."""

    @property
    def ttft_s(self) -> float | None:
        """Return the time to the first token, None where it is not known."""
        if self.result is not None:
            return self.result.timings.ttft_s
        return self.arrivals[0][0] if self.arrivals else None


class System(Protocol):
    """Something that continues prompts, loaded and ready."""

    @property
    def name(self) -> str: ...

    def generate(self, task: Task) -> Sample:
        """Do the task and time it."""
        ...
