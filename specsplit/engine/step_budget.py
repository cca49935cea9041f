"""The budget of one step: which of the tasks that are ready go, and how much of each.

    step   [ one row of each session in a round | nodes of all trees, those worth most first | rows of prompts ]

Also how long it waits for more of them. Knows no tensors; only the executor touches it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from specsplit.core.types import Identity
from specsplit.engine.batch import Batch, Task
from specsplit.engine.company import Company
from specsplit.engine.measured_times import MeasuredTimes
from specsplit.engine.offered_tree import OfferedTree
from specsplit.engine.prompt_budget import MAX_STEP_ROWS, PromptBudget
from specsplit.engine.step_width import StepWidth
from specsplit.engine.verification_budget import VerificationBudget
from specsplit.speculation.step_times import StepTimes


class StepBudget:
    """Gives rounds one row each, trees as many as pay, and prompts what leaves those rounds their pace."""

    def __init__(self, *, expects_company: bool = True) -> None:
        self.expects_company = expects_company
        """Whether a step may begin while sessions that were answered are about to come back."""
        self.prompts, self.verification, self.width = PromptBudget(), VerificationBudget(), StepWidth()
        self._measured: MeasuredTimes | None = None
        self.quick_s = 0.0
        """Seconds below which a step of one task has to be observed as well: it is quicker than any should be."""
        self._company = Company()

    def pace(self, times: StepTimes) -> None:
        """Judge rows by the measured seconds of a forward."""
        self.prompts.times = self.verification.times = times

    def pace_by(self, measured: MeasuredTimes) -> None:
        """Judge rows by what the worker measured of its forwards, and by steps that show that it was too much."""
        self._measured, self.quick_s = measured, measured.quick_s
        self.pace(measured.curve)

    def with_times(self, identity: Identity) -> Identity:
        """Return a worker's identity with what is known of its forwards' times."""
        return self._measured.with_times(identity) if self._measured is not None else identity

    def limits(self, task: Task) -> bool:
        """Whether a task that is alone in its step may have to be cut all the same."""
        return self.prompts.is_limited or (task.can_be_cut and self._num_expected() > 0)

    def _num_expected(self) -> int:
        """Return how many sessions would come back before a step of as many rows as there may be has ended."""
        times = self.prompts.times
        if times is None:
            return 0
        return self._company.num_expected(time.perf_counter(), times.seconds(MAX_STEP_ROWS))

    def share_out(self, ready: Sequence[Task], beside: Iterable[Batch] = ()) -> tuple[list[Task], dict[Task, int]]:
        """Return the tasks that go, and of prompts among them how many of their next rows; trees are cut.

        The pace of the rounds in steps `beside` it, which are on their way, counts as well, or else that of sessions
        that are about to come back.
        """
        self.cut(ready)
        rounds = [task for batch in beside for task in batch.tasks if not task.can_be_cut]
        parts = self.prompts.share_out(ready, rounds, self._num_expected())
        return [task for task in ready if parts.get(task) != 0], parts

    def cut(self, ready: Sequence[Task]) -> None:
        """Leave of the trees that these tasks offer what is worth its rows, and has room."""
        self.verification.cut(ready, self.prompts)

    def came(self, task: Task) -> None:
        """Count that a session's next round is here."""
        if task.session is not None:
            self._company.came(task.session, task.times.submitted_s)

    def left(self, task: Task) -> None:
        """Count that a task has ended: after a round its session is expected back."""
        if task.session is not None and task.round is not None:
            self._company.left(task.session, time.perf_counter())
        elif task.session is not None:
            self._company.forget(task.session)

    def wait_s(self, running: Collection[Task], arrived: Collection[Task]) -> float:
        """Return the seconds for which it pays to wait for others before a step of these; 0 before times are known."""
        times, session_s = self.prompts.times, self.prompts.cost.session_s
        num_ready = len(running) + len(arrived)
        if times is None or not num_ready or self._company.is_complete:
            return 0.0
        num_rows = len(arrived) + sum(map(self._least_rows, running))

        def joint_s(more: int) -> float:
            return times.seconds(num_rows + more) + (num_ready + more) * session_s

        def apart_s(count: int) -> float:
            return times.seconds(count) + count * session_s

        return self._company.wait_s(joint_s, apart_s, time.perf_counter())

    def _least_rows(self, task: Task) -> int:
        """Return the rows that go of a task in any case: those of an offered tree are weighed later."""
        sequence = task.sequence
        if isinstance(sequence, OfferedTree):
            return task.num_rows - len(sequence.path_log_probs)
        return min(task.num_rows, self.prompts.chunk_tokens)

    def observe(self, batch: Batch, end_s: float) -> None:
        """Count a step that ended now. One task that is alone says nothing of what others cost."""
        measured, is_its_own = self._measured, not batch.is_overlapped
        if measured is not None and is_its_own and measured.observe(batch.num_rows, end_s - batch.start_s):
            self.pace_by(measured)
        if len(batch.tasks) == 1:
            return
        self.verification.observe(batch, end_s, self.prompts.cost.pair_s)
        if not batch.is_overlapped:
            self.prompts.observe(batch.num_rows, len(batch.tasks), batch.num_pairs, end_s - batch.start_s)
