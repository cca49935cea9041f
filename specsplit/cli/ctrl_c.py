"""Ctrl-C and SIGTERM while text is generated: the work ends early, what is there is kept, and sessions are closed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class CtrlC:
    """Owns SIGINT and SIGTERM for the life of the loop: they cancel the work, never the closing of sessions."""

    # asyncio's own handler would cancel the main task wherever it stands, so also while it closes sessions.
    def __init__(self) -> None:
        self.was_pressed = False
        self._work: asyncio.Task[None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._press)

    def _press(self) -> None:
        if self._work is not None and not self.was_pressed:
            self._work.cancel()
        self.was_pressed = True

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or Ctrl-C cancels it."""
        self._work = asyncio.create_task(work)
        # Pressed before there was any work to cancel.
        if self.was_pressed:
            self._work.cancel()
        await asyncio.wait([self._work])
        if not self._work.cancelled():
            self._work.result()


class EachCtrlC:
    """Owns SIGINT for the life of the loop: each one cancels the work of that moment alone, and the next work runs."""

    def __init__(self) -> None:
        self._is_due = False
        self._work: asyncio.Task[Any] | None = None
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._press)

    def _press(self) -> None:
        if self._work is None:
            self._is_due = True
        elif not self._work.cancelling():
            # Only once, since a second one would break the closing of a session off.
            self._work.cancel()

    async def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` until it ends or Ctrl-C cancels it; return its task, which has ended."""
        self._work = task = asyncio.create_task(work)
        # Pressed between two pieces of work: it is for the one that follows.
        if self._is_due:
            task.cancel()
        self._is_due = False
        try:
            await asyncio.wait([task])
        finally:
            self._work = None
        return task
