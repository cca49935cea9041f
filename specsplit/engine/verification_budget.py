"""One verification budget over all sessions: the likeliest nodes of all trees go, as many as give the most tokens.

    tokens per second of k nodes = (sessions + P(node 1) + ... + P(node k)) / seconds of a step with k nodes

Plain arithmetic; knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from specsplit.engine.batch import Batch, Task
from specsplit.engine.offered_tree import OfferedTree
from specsplit.speculation.step_times import RunningMedian, StepTimes

IDLE = 8.0
"""Times as long as its forward that a step's period counts at most. Chosen: beyond it nobody was there to verify."""


class VerificationBudget:
    """Weighs the nodes of all sessions that are ready against each other and against their rows.

    Before `times` are measured nothing is cut. What a step takes beside its rows is measured as it runs, a share for
    each session: its attention, and the time until its next round is here.
    """

    def __init__(self, times: StepTimes | None = None) -> None:
        self.times = times
        """Seconds of a forward of one session by its rows."""
        self._beside_s = RunningMedian()
        """Seconds a step takes for each session, beside its rows."""
        self._last_end_s = -math.inf

    def cut(self, tasks: Sequence[Task]) -> None:
        """Leave of the trees that these tasks offer what is worth its rows, all sessions together."""
        offers = [(task, task.sequence) for task in tasks if isinstance(task.sequence, OfferedTree)]
        if self.times is None or not offers:
            return
        trees = [offer.path_log_probs for _, offer in offers]
        rounds = [task.num_rows for task in tasks if not task.can_be_cut]
        least = self.least_path(self.times, trees, sum(rounds) - sum(map(len, trees)), len(rounds))
        for task, offer in offers:
            task.sequence = offer.cut(least)

    def observe(self, batch: Batch, end_s: float) -> None:
        """Count a step of several sessions that ended now; one with a part of a prompt says nothing of verifies."""
        period_s = min(end_s - self._last_end_s, IDLE * (end_s - batch.start_s))
        self._last_end_s = end_s
        if self.times is not None and not batch.parts:
            rows = sum(len(sequence.token_ids) for sequence in batch.sequences)
            self._beside_s.observe(max(period_s - self.times.seconds(rows), 0.0) / len(batch.tasks))

    def least_path(self, times: StepTimes, trees: Sequence[Sequence[float]], rows: int, num_sessions: int) -> float:
        """Return the least log-probability of a path that is worth a row of a step; infinity if no node is.

        `trees` are the paths' log-probabilities of the sessions' nodes, and `rows` are those of the step without
        them: the roots of all its sessions, and the tails before them.
        """
        ranked = sorted(chain.from_iterable(trees), reverse=True)
        curve, beside_s = times.curve(rows + len(ranked)), self._beside_s.value * num_sessions
        tokens, least = float(num_sessions), math.inf
        best = tokens / (curve[rows] + beside_s)
        # A whole stair of the curve may pay where its first node does not, so the search goes on beyond a loss.
        for row, path in enumerate(ranked, rows + 1):
            tokens += math.exp(path)
            rate = tokens / (curve[row] + beside_s)
            if rate > best:
                best, least = rate, path
        return least
