"""A real runner whose steps a test can watch, hold and fail: what a slow or a broken device looks like to an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

from torch import Tensor

from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from specsplit.model.runner import Runner

_PATIENCE_S = 60.0
"""How long a broken test may hang; a sound one never waits for it."""


class SteeredRunner(Runner):
    """Runs the forwards of the runner that it is made `over`, over the same memory."""

    steps: list[list[SequenceInput]]
    """The entries of every step so far, failed ones included."""
    logits: list[list[Tensor]]
    """The logits of those steps, without the failed ones."""
    failures: dict[int, Exception]
    """Steps to come, counted from 0, that raise instead."""
    _entered: threading.Event
    _permits: threading.Semaphore | None
    """One permit a step while steps are held."""

    @classmethod
    def over(cls, runner: Runner) -> Self:
        steered = cls.__new__(cls)
        steered.__dict__.update(runner.__dict__)
        steered.reset()
        return steered

    def reset(self) -> None:
        """Forget every step; hold and fail none."""
        self.steps, self.logits, self.failures = [], [], {}
        self._entered, self._permits = threading.Event(), None

    def forward(self, entries: Sequence[SequenceInput]) -> list[Tensor]:
        index, permits = len(self.steps), self._permits
        self.steps.append(list(entries))
        if permits is not None:
            self._entered.set()
            assert permits.acquire(timeout=_PATIENCE_S), "nobody released the step"
        if index in self.failures:
            raise self.failures[index]
        self.logits.append(super().forward(entries))
        return self.logits[-1]

    @contextmanager
    def held(self) -> Generator[None]:
        """Hold every step that begins within the block; leaving it releases the one that is held."""
        self._entered.clear()
        self._permits = permits = threading.Semaphore(0)
        try:
            yield
        finally:
            self._permits = None
            permits.release()

    async def wait_entered(self) -> None:
        """Wait until a step is being held."""
        assert await asyncio.to_thread(self._entered.wait, _PATIENCE_S), "no step began"

    async def pass_one(self) -> None:
        """Let the step that is being held run, and wait until the next one is being held."""
        assert self._permits is not None
        self._entered.clear()
        self._permits.release()
        await self.wait_entered()


def steered(model: LoadedModel) -> tuple[LoadedModel, SteeredRunner]:
    """Return the model over a steered runner, and that runner."""
    runner = SteeredRunner.over(model.runner)
    return replace(model, runner=runner), runner
