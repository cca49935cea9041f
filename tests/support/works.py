"""Works for a worker whose course a test can read: what they did, in the order in which they did it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from torch import Tensor

from specsplit.engine.scheduler import WorkQueue
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from tests.support.runners import SteeredRunner, steered

Work = Generator[SequenceInput, Tensor, str]


@dataclass
class Diary:
    """Records what the works of a test did, in that order."""

    lines: list[str] = field(default_factory=list[str])

    def work(self, name: str, num_forwards: int = 1, *, slot: int = 0, error: Exception | None = None) -> Work:
        """Feed `num_forwards` tokens, then raise `error` or return the name."""
        self.lines.append(f"{name} begins")
        try:
            for position in range(num_forwards):
                logits = yield SequenceInput(slot, position, [7])
                assert logits.shape == (1, 320)
                self.lines.append(f"{name} got logits")
        except GeneratorExit:
            self.lines.append(f"{name} is closed")
            raise
        except Exception as failure:
            self.lines.append(f"{name} hears that {failure}")
            raise
        if error is not None:
            raise error
        return name


async def submitted(*tasks: asyncio.Task[object]) -> None:
    """Give tasks just made the turn in which they hand their work over."""
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


@asynccontextmanager
async def queue_over_a_steered_runner(model: LoadedModel) -> AsyncIterator[tuple[WorkQueue, SteeredRunner]]:
    loaded, runner = steered(model)
    queue = WorkQueue(loaded.runner, name="tested")
    try:
        yield queue, runner
    finally:
        await queue.close()


def alive_work() -> list[object]:
    """Return everything alive that belongs to a session or to its work."""
    return [
        kept
        for kept in gc.get_objects()
        if type(kept).__name__ in ("WorkerSession", "Grower", "Task", "SessionQueue")
        and type(kept).__module__.startswith("specsplit")
    ]
