"""How many sessions share a target's steps, of this process and of others. Knows no times."""

from __future__ import annotations

from specsplit.speculation.step_times import RunningMedian


class DecodingSessions:
    """How many sessions of this process are behind their prompts, at one target, and how many are not yet."""

    __slots__ = ("count", "num_beginning")

    def __init__(self) -> None:
        self.count = 0
        self.num_beginning = 0


class StepSessions:
    """Sessions that share the target's steps: the share of those here that lately did, and as many others as lately.

    So a change of the number here shows at once, and not after some rounds that were planned for another load.
    """

    def __init__(self, here: DecodingSessions) -> None:
        self._here = here
        self._share, self._others = RunningMedian(1.0), RunningMedian(0)

    def observe(self, num_sessions: int) -> None:
        """Count a step with so many sessions."""
        here = max(self._here.count, 1)
        self._share.observe(min(num_sessions / here, 1.0))
        self._others.observe(max(num_sessions - here, 0))

    @property
    def begin_together(self) -> bool:
        """Whether several are not behind their prompts yet, so that the load of their rounds is not known."""
        return self._here.num_beginning > 1

    @property
    def load(self) -> int:
        """Sessions at the target, those whose rounds meet in none of its steps too."""
        return max(self._here.count, 1) + self._others.value

    @property
    def value(self) -> int:
        return max(round(self._share.value * max(self._here.count, 1)), 1) + self._others.value
