"""How wide a step may be once one has failed: out of memory its tasks go in smaller steps, and so do later ones.

    batch   [ tasks that fit together | the next ones | ... ]    a task that is alone goes whatever it takes

A forward writes behind its slots' lengths alone, so one that has failed may be done again; a chain's fails so where a
stage of it does, and also for one session's rows, if a stage refuses them. Knows rows alone, though long contexts take
memory as well: a bound that is too wide is halved again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from specsplit.core.errors import InvalidPacket, OutOfMemory
from specsplit.engine.batch import Batch
from specsplit.model.memory import is_exhausted

NARROW_S = 60.0
"""Seconds until a wider step is tried again. Chosen: one failed forward a minute, should the memory stay short."""
_log = logging.getLogger(__name__)


class StepWidth:
    """Rows of several tasks that one step may have."""

    def __init__(self) -> None:
        self.max_rows: float = math.inf
        self._until_s = 0.0

    def rows_after(self, batch: Batch, error: Exception) -> float | None:
        """Return how many rows the parts of a batch that failed so may have; None if all of them would fail.

        If memory ran out, steps are half as wide from now on.
        """
        if len(batch.tasks) == 1:
            return None
        if isinstance(error, InvalidPacket):  # hidden states that are not finite, of one session: it has to fail alone
            return 0
        if not (is_exhausted(error) or isinstance(error, OutOfMemory)):
            return None
        self.max_rows, self._until_s = batch.num_rows // 2, time.monotonic() + NARROW_S
        _log.warning("a step of %d rows ran out of memory; its sessions go on in smaller ones", batch.num_rows)
        return self.max_rows

    def exceeded(self, batch: Batch) -> float | None:
        """Return the bound that makes a batch go in parts; None if it goes as it is."""
        if time.monotonic() > self._until_s:
            self.max_rows = math.inf
        return self.max_rows if len(batch.tasks) > 1 and batch.num_rows > self.max_rows else None

    def run_parts(self, batch: Batch, most_rows: float, run: Callable[[Batch], None]) -> None:
        """Call `run` with the tasks of a batch in parts that are not too wide; meanwhile they may become narrower."""
        first, sizes = 0, [len(sequence.token_ids) for sequence in batch.sequences]
        for task in batch.tasks:
            task.times.ready_s = batch.start_s  # until then its wait is counted
        while first < len(sizes):
            end, num_rows = first + 1, sizes[first]
            while end < len(sizes) and num_rows + sizes[end] <= min(most_rows, self.max_rows):
                num_rows += sizes[end]
                end += 1
            tasks = batch.tasks[first:end]
            run(Batch(tasks, {task: batch.parts[task] for task in tasks if task in batch.parts}))
            first = end
