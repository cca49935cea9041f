"""Awaiting work that must not be left half done when its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Await `work` to its end; a cancellation of the caller is raised only after that."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    # asyncio.wait does not cancel what it waits for, and a second cancellation may come while the first is held back.
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
