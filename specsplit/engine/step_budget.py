"""The rows of prompts in one step: as many as leave the rounds that are ready their pace.

    step   [ rounds: nobody stands still | the oldest prompt's next rows | the next one's, if there is room ]

Plain arithmetic over numbers of rows; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from specsplit.speculation.step_times import StepTimes

MAX_STEP_ROWS = 512
"""Rows of prompts in a step without rounds. Chosen: beyond it a row costs no less, and everybody waits longer."""
LEAST_PROMPT_ROWS = 32
"""Rows of prompts that a step takes in any case, so that no prompt starves."""
MOST_SLOWDOWN = 2.0
"""Times as long as its rounds alone that a step with prompts may take."""
_DOUBLINGS = (512, 256, 128, 64)


class Cuttable(Protocol):
    """A task that is ready."""

    @property
    def num_rows(self) -> int: ...

    @property
    def can_be_cut(self) -> bool:
        """Whether it is a piece of a prompt, of which a step may take a part."""
        ...


P = TypeVar("P", bound=Cuttable)


class StepBudget:
    """Shares out a step. Before `times` are measured only MAX_STEP_ROWS bounds the prompts."""

    def __init__(self) -> None:
        self.times: StepTimes | None = None
        """Seconds of a forward by its rows."""

    def prompt_rows(self, round_rows: int) -> int:
        """Return how many rows of prompts may go with so many rows of rounds."""
        if not round_rows or self.times is None:
            return MAX_STEP_ROWS
        limit_s = MOST_SLOWDOWN * self.times.seconds(round_rows)
        fitting = (rows for rows in _DOUBLINGS if self.times.seconds(round_rows + rows) <= limit_s)
        return next(fitting, LEAST_PROMPT_ROWS)

    def share_out(self, tasks: Sequence[P]) -> dict[P, int]:
        """Return how many of their next rows the prompts among the tasks take, by arrival; 0 for one that waits.

        Tasks that cannot be cut go whole.
        """
        prompts = [task for task in tasks if task.can_be_cut]
        if not prompts:
            return {}
        left = self.prompt_rows(sum(task.num_rows for task in tasks if not task.can_be_cut))
        shares: dict[P, int] = {}
        for task in prompts:
            shares[task] = min(task.num_rows, left)
            left -= shares[task]
        return shares
