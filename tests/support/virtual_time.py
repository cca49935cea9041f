"""An asyncio event loop whose clock is virtual: when nothing is ready, time jumps to the next timer.

Nothing waits, so hours pass in milliseconds and one seed always gives one run. No threads, no sockets: with nothing
ready and no timer the loop can only hang, and says so instead. Knows nothing of SpecSplit.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_MAX_TURNS = 200_000
"""Turns of the loop after which a run counts as endless; far more than any test needs."""


class VirtualTimeError(AssertionError):
    """The run cannot go on: everybody waits for somebody, or it would never end."""


class _JumpingSelector(selectors.BaseSelector):
    """Selects nothing, ever: what it would wait, it adds to the clock."""

    def __init__(self, max_turns: int) -> None:
        self.now_s = 0.0
        self.turns = 0
        self._max_turns = max_turns
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        self.turns += 1
        if self.turns > self._max_turns:
            raise VirtualTimeError(f"no end after {self._max_turns} turns of the loop, at {self.now_s:.3f} s")
        if timeout is None:
            raise VirtualTimeError(f"deadlock at {self.now_s:.3f} s: nothing is ready and no timer is set")
        self.now_s += max(0.0, timeout)
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[fileobj]


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop of timers and callbacks only; `time` is virtual seconds from 0."""

    def __init__(self, max_turns: int = _MAX_TURNS) -> None:
        self._jumping = _JumpingSelector(max_turns)
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now_s

    @property
    def turns(self) -> int:
        """Turns of the loop so far, or since `grant_turns`."""
        return self._jumping.turns

    def grant_turns(self) -> None:
        """Count turns from 0 again."""
        self._jumping.turns = 0

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        raise VirtualTimeError("a thread was asked for: virtual time knows none")


class LoopClock:
    """The Clock port over the time of the loop that is running."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, max_turns: int = _MAX_TURNS) -> T:
    """Run `main` to its end in virtual time; tasks that it leaves behind are an error.

    Raises:
        VirtualTimeError: a deadlock, a run without end, or tasks left behind; whatever `main` raises comes first.
    """
    loop = VirtualTimeLoop(max_turns)
    try:
        result = loop.run_until_complete(main())
        left = sorted(task.get_name() for task in asyncio.all_tasks(loop))
        if left:
            raise VirtualTimeError(f"tasks were left behind: {', '.join(left)}")
        return result
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: VirtualTimeLoop) -> None:
    """End what a failed run left, so that its tasks do not complain later; a second failure adds nothing."""
    loop.grant_turns()
    loop.set_exception_handler(lambda loop, context: None)
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()

    async def end() -> None:
        await asyncio.gather(*tasks, return_exceptions=True)

    with contextlib.suppress(VirtualTimeError):
        loop.run_until_complete(end())
    with contextlib.suppress(VirtualTimeError):
        loop.run_until_complete(loop.shutdown_asyncgens())
