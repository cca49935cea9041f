"""Whether a device still computes, judged by the outcomes of its steps. Knows neither models nor sessions."""

from __future__ import annotations

import time

from specsplit.core.errors import ModelDamaged, OutOfMemory, SpecSplitError

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which a device is not well: fewer may be one odd request."""
HUNG_S = 600.0
"""A step that takes longer outlives every call that could wait for it."""


def is_of_device(error: Exception) -> bool:
    """Return whether an error says something about the device or its model, and not about the request or session."""
    return not isinstance(error, SpecSplitError) or isinstance(error, OutOfMemory | ModelDamaged)


class DeviceHealth:
    """Counts the failed steps in a row. Written by the device only; anyone may ask."""

    def __init__(self) -> None:
        self._num_failed = 0
        self._is_failing = self._is_sound = False
        self._began_s: float | None = None

    @property
    def is_well(self) -> bool:
        """Whether the last steps did not all fail; one that succeeds makes it so again."""
        return self._num_failed < MAX_FAILED_STEPS and not self.is_hung

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last step failed."""
        return self._num_failed > 0

    @property
    def is_hung(self) -> bool:
        """Whether a step has been under way for longer than any call lasts."""
        began_s = self._began_s
        return began_s is not None and time.monotonic() - began_s > HUNG_S

    def begin_step(self) -> None:
        """Take note that a step begins."""
        self._began_s = time.monotonic()

    def fail(self, error: Exception) -> None:
        """Take note of an error in this step; those of requests say nothing."""
        self._is_failing = self._is_failing or is_of_device(error)

    def succeed(self) -> None:
        """Take note that work which had a forward has come to its result in this step."""
        self._is_sound = True

    def end_step(self) -> None:
        """Judge the step: one success in it is enough, and without success or error of the device it says nothing."""
        if self._is_sound:
            self._num_failed = 0
        elif self._is_failing:
            self._num_failed += 1
        self._is_failing = self._is_sound = False
        self._began_s = None
