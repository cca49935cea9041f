"""The budget of one step: which of the tasks that are ready go, and how much of each.

    step   [ one row of each session in a round | nodes of all trees, the likeliest first | rows of prompts ]

Knows no tensors; only the executor touches it.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.engine.batch import Batch, Task
from specsplit.engine.prompt_budget import PromptBudget
from specsplit.engine.verification_budget import VerificationBudget
from specsplit.speculation.step_times import StepTimes


class StepBudget:
    """Gives rounds one row each, trees as many as pay, and prompts what leaves those rounds their pace."""

    def __init__(self) -> None:
        self.prompts, self.verification = PromptBudget(), VerificationBudget()

    def pace(self, times: StepTimes) -> None:
        """Judge rows by the measured seconds of a forward."""
        self.prompts.times = self.verification.times = times

    def share_out(self, ready: Sequence[Task]) -> tuple[list[Task], dict[Task, int]]:
        """Return the tasks that go, and of prompts among them how many of their next rows; trees are cut."""
        self.cut(ready)
        parts = self.prompts.share_out(ready)
        return [task for task in ready if parts.get(task) != 0], parts

    def cut(self, ready: Sequence[Task]) -> None:
        """Leave of the trees that these tasks offer what is worth its rows, and has room."""
        self.verification.cut(ready, self.prompts)

    def observe(self, batch: Batch, end_s: float) -> None:
        """Count a step of several tasks that ended now."""
        self.verification.observe(batch, end_s)
        self.prompts.observe(batch.num_rows, len(batch.tasks), batch.num_pairs, end_s - batch.start_s)
