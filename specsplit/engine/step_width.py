"""How wide a step may be once one has run out of memory: its tasks go in several smaller steps, and so do later ones.

    batch   [ tasks that fit together | the next ones | ... ]    a task that is alone goes whatever it takes

A forward writes behind its slots' lengths alone, so one that has failed may be done again; a chain's fails so where a
stage of it does. Knows rows alone, though long contexts take memory as well: a bound that is too wide is halved again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from specsplit.core.errors import OutOfMemory
from specsplit.engine.batch import Batch
from specsplit.model.memory import is_exhausted

NARROW_S = 60.0
"""Seconds until a wider step is tried again. Chosen: one failed forward a minute, should the memory stay short."""
_log = logging.getLogger(__name__)


class StepWidth:
    """Rows of several tasks that one step may have."""

    def __init__(self) -> None:
        self.max_rows = math.inf
        self._until_s = 0.0

    def narrow(self, batch: Batch, error: Exception) -> bool:
        """Return whether a batch that failed so may succeed in parts; from now on steps are half as wide."""
        if len(batch.tasks) == 1 or not (is_exhausted(error) or isinstance(error, OutOfMemory)):
            return False
        self.max_rows, self._until_s = batch.num_rows // 2, time.monotonic() + NARROW_S
        _log.warning("a step of %d rows ran out of memory; its sessions go on in smaller ones", batch.num_rows)
        return True

    def is_exceeded(self, batch: Batch) -> bool:
        """Whether a batch has to go in parts."""
        if time.monotonic() > self._until_s:
            self.max_rows = math.inf
        return len(batch.tasks) > 1 and batch.num_rows > self.max_rows

    def run_parts(self, batch: Batch, run: Callable[[Batch], None]) -> None:
        """Call `run` with the tasks of a batch in parts that are not too wide; meanwhile they may become narrower."""
        first, sizes = 0, [len(sequence.token_ids) for sequence in batch.sequences]
        for task in batch.tasks:
            task.times.ready_s = batch.start_s  # until then its wait is counted
        while first < len(sizes):
            end, num_rows = first + 1, sizes[first]
            while end < len(sizes) and num_rows + sizes[end] <= self.max_rows:
                num_rows += sizes[end]
                end += 1
            tasks = batch.tasks[first:end]
            run(Batch(tasks, {task: batch.parts[task] for task in tasks if task in batch.parts}))
            first = end
