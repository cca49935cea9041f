"""Times of a worker's forwards by their rows: as measured when it began, or less where steps have shown it since.

Other work beside a start, as of the workers that begin with it, makes forwards longer, and nothing makes one shorter.
So whoever paces prompts and trees by such a start learns the truth from the first quick steps. Knows no tasks.
"""

from __future__ import annotations

import math
from dataclasses import replace

from specsplit.core.types import Identity
from specsplit.speculation.constants import ROW_GRID, SLOW_START
from specsplit.speculation.step_times import StepTimes


class MeasuredTimes:
    """The times that a worker tells, and paces its steps by; only the executor observes."""

    def __init__(
        self, step_times: tuple[tuple[int, float], ...], fork_s: float = 0.0, text_token_s: float = 0.0
    ) -> None:
        self.times = step_times, fork_s, text_token_s
        """Seconds of a forward by its rows, ascending, of a further branch of its tree, and of a token of its text.

        Replaced at once.
        """
        self.curve = StepTimes.from_start(step_times)

    def with_times(self, identity: Identity) -> Identity:
        """Return the worker's identity with its times."""
        step_times, fork_s, text_token_s = self.times
        return replace(identity, step_times=step_times, fork_s=fork_s, text_token_s=text_token_s)

    @property
    def quick_s(self) -> float:
        """Seconds of a step below which it disproves the times, however few its rows."""
        return SLOW_START * self.curve.seconds(1)

    def observe(self, rows: int, seconds: float) -> bool:
        """Count a step; return whether it has shown that forwards take much less than was measured.

        Its sessions' texts make a step longer, so its time is a bound: of its rows, and of fewer.
        """
        believed_s = self.curve.seconds(rows)
        if seconds >= SLOW_START * believed_s:
            return False
        step_times, fork_s, text_token_s = self.times
        size, times = max(count for count in ROW_GRID if count <= rows), dict(step_times)
        if seconds >= times.get(size, math.inf):
            return False  # beyond its points the curve goes on too steeply, which says nothing of them
        times[size] = seconds
        # Branches and texts were measured beside the same work.
        share = seconds / believed_s
        self.times = tuple(sorted(times.items())), fork_s * share, text_token_s * share
        self.curve = StepTimes.from_start(self.times[0])
        return True
