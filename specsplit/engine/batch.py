"""One step of a worker: the tasks whose entries are forwarded together, and what it cost them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specsplit.engine.queue import Task
from specsplit.model.attention.metadata import SequenceInput
from specsplit.telemetry import spans


class Step:
    """Begins when it is made; nothing else of its tasks is done before it ends."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.entries: list[SequenceInput] = []
        self._start_s = time.perf_counter()
        for task in tasks:
            assert task.entry is not None, "a task that is ready has one"
            self.entries.append(task.entry)
            task.is_under_way = True
            task.waited_s += self._start_s - task.ready_s

    def end(self, worker: str) -> None:
        """Count the forward for every task, and record it for those that have a span."""
        elapsed_ms = (time.perf_counter() - self._start_s) * 1e3
        for number, task in enumerate(self.tasks):
            entry = self.entries[number]
            task.is_under_way = False
            task.device_ms += elapsed_ms
            task.num_forwards += 1
            task.num_tokens += len(entry.token_ids)
            task.batch_size = max(task.batch_size, len(self.entries))
            if task.context is not None:
                end_ns = time.time_ns()
                spans.record(
                    "forward",
                    task.context,
                    end_ns - round(elapsed_ms * 1e6),
                    end_ns,
                    worker=worker,
                    num_tokens=len(entry.token_ids),
                    base_length=entry.base_length,
                    batch_size=len(self.entries),
                )
