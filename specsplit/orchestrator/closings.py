"""The closes of sessions at one worker, for requests that find no slot while those before them still give theirs back.

Knows tasks only.
"""

from __future__ import annotations

import asyncio
import logging

from specsplit.core.errors import LinkError, ResourceError

_log = logging.getLogger(__name__)
CLOSE_S = 1.0
"""How long anybody waits for workers to free the slots of ended requests."""


class Closings:
    """The closes under way at one worker."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, task: asyncio.Task[None]) -> None:
        """Count a close until it has ended."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def before(self) -> EarlierCloses:
        """Return the closes that are under way as a request begins."""
        return EarlierCloses(self, self._tasks.copy())

    async def end(self) -> None:
        """Wait until all have ended, CLOSE_S at most, and end those that take longer."""
        tasks = self._tasks.copy()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def forget(self, late: set[asyncio.Task[None]]) -> None:
        """Let nobody wait any more for closes that took too long: a worker that hangs frees slots by itself."""
        self._tasks -= late


class EarlierCloses:
    """The closes that were under way as one request began: their slots may be those that it lacks."""

    def __init__(self, closings: Closings, tasks: set[asyncio.Task[None]]) -> None:
        self._closings, self._tasks = closings, tasks

    async def wait(self, limit_s: float = CLOSE_S) -> bool:
        """Wait for them once, CLOSE_S at most; return whether there were any, so that asking again may help."""
        # Some may have ended since, and even then the refusal may be from before.
        tasks, self._tasks = self._tasks, set[asyncio.Task[None]]()
        if not tasks:
            return False
        _, late = await asyncio.wait(tasks, timeout=max(0.0, min(limit_s, CLOSE_S)))
        self._closings.forget(late)
        return True


def log_failure(close: asyncio.Task[None]) -> None:
    """Log why a close failed, for which nobody may wait any more."""
    if not close.cancelled() and (error := close.exception()) is not None:
        level = logging.DEBUG if isinstance(error, LinkError | ResourceError) else logging.WARNING
        _log.log(level, "a session could not be closed; its slot is freed when its time is over", exc_info=error)
