"""Ctrl-C and SIGTERM while text is generated: the work ends early, what is there is kept, and sessions are closed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


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
