"""The event loop of our own processes and threads: uvloop's, whose turns cost a fraction of asyncio's.

A caller that brings its own loop is served on that one, whatever it is.
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
"""Delays of this length or longer, infinity included, go to uvloop as they are; a millisecond is nothing to them."""

if sys.platform == "win32":

    def new_event_loop() -> asyncio.AbstractEventLoop:
        """Return a loop for a thread of ours to run."""
        return asyncio.new_event_loop()

else:
    import uvloop

    class _Loop(uvloop.Loop):
        """A loop with asyncio's clock, whose timers are never early; uvloop's own clock has whole milliseconds only.

        After a forward has blocked the loop, due timers fire before the tasks that wait for the forward go on.
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
                # uvloop counts whole milliseconds from a clock that may be one behind: round up, and add one.
                delay = (math.ceil(delay * 1e3) + 1) / 1e3
            return super().call_later(delay, callback, *args, context=context)

    def new_event_loop() -> asyncio.AbstractEventLoop:
        """Return a loop for a thread of ours to run."""
        return _Loop()


def runner() -> asyncio.Runner:
    """Return a runner that runs coroutines one after another on one such loop, as `asyncio.Runner` does."""
    return asyncio.Runner(loop_factory=new_event_loop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on such a loop, as `asyncio.run` does."""
    with runner() as loop:
        return loop.run(main)
