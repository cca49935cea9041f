"""The event loop of our own processes and threads: uvloop's, whose turns cost a fraction of asyncio's.

Who brings a loop of their own is served on that, whatever it is.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_LONG_S = 1e6
"""Delays from here on, infinity too, are uvloop's to refuse or cap; a millisecond is nothing to them."""

if sys.platform == "win32":

    def new_event_loop() -> asyncio.AbstractEventLoop:
        """Return a loop for a thread of ours to run."""
        return asyncio.new_event_loop()

else:
    import uvloop

    class _Loop(uvloop.Loop):
        """Tells the time as asyncio does, and is never early by it; uvloop's own time has whole milliseconds only.

        After a forward has held it up, timers that are due go off before those who wait for the forward go on.
        """

        time = staticmethod(time.monotonic)  # type: ignore[assignment]

        def call_later(
            self,
            delay: float,
            callback: Callable[[*Ts], object],
            *args: *Ts,
            context: Context | None = None,
        ) -> asyncio.TimerHandle:
            """Call back no sooner than in `delay` seconds, at most two milliseconds later."""
            if 0 < delay < _LONG_S:
                delay = (math.ceil(delay * 1e3) + 1) / 1e3  # the clock it counts from may be a millisecond behind
            return super().call_later(delay, callback, *args, context=context)

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
