"""The order in which systems take turns, so that a noisy machine disturbs all alike, and Ctrl-C between two turns."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
Tick = Callable[[str], None]
"""Called with a system's name when it has done a task."""
ShouldStop = Callable[[], bool]
"""Asked between any two runs."""


def running_order(systems: Sequence[T], round_number: int, task_number: int) -> list[T]:
    """Return the systems in an order that turns round every other round and rotates with the task and every two rounds.

    So for each task each system has each place as often, and is preceded by each of its neighbours.
    """
    start = (round_number // 2 + task_number) % len(systems)
    rotated = [*systems[start:], *systems[:start]]
    return rotated[::-1] if round_number % 2 else rotated


@contextmanager
def interrupts_between_runs() -> Generator[ShouldStop]:
    """Let the first Ctrl-C end the measurement after the run that is under way, and the second one everything."""
    seen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
