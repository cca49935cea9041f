"""The event loop of our own processes and threads: uvloop's, whose turns cost a fraction of asyncio's.

Who brings a loop of their own is served on that, whatever it is.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

if sys.platform == "win32":

    def new_event_loop() -> asyncio.AbstractEventLoop:
        """Return a loop for a thread of ours to run."""
        return asyncio.new_event_loop()

else:
    import uvloop

    class _Loop(uvloop.Loop):
        """Tells the time as asyncio does; uvloop's own time is in whole milliseconds and stands still in a turn."""

        time = staticmethod(time.monotonic)  # type: ignore[assignment]

    def new_event_loop() -> asyncio.AbstractEventLoop:
        """Return a loop for a thread of ours to run."""
        return _Loop()


def runner() -> asyncio.Runner:
    """Return what runs coroutines one after another on one such loop, as `asyncio.Runner` does."""
    return asyncio.Runner(loop_factory=new_event_loop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on such a loop, as `asyncio.run` does."""
    with runner() as loop:
        return loop.run(main)
