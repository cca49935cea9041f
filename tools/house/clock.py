"""A clock for the route: forwards take the time that their rows cost, and everything else next to none.

So `auto` decides alike on every machine and however busy it is, and the same calls are counted each time.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_READ_S = 1e-5
"""A reading takes a moment, so that whoever waits for a later time sees it come."""
_FORWARD_S = {"target": (2e-3, 0.1e-3), "draft": (0.25e-3, 0.02e-3)}
"""Seconds of a forward and of each of its rows: a target for which a draft of an eighth of its time pays off."""


class Clock:
    """A time that passes as forwards are made."""

    def __init__(self) -> None:
        self._now_s = time.monotonic()

    def now(self) -> float:
        self._now_s += _READ_S
        return self._now_s

    def pass_forward(self, role: str, num_rows: int) -> None:
        """Let the time of one forward pass."""
        base_s, row_s = _FORWARD_S[role]
        self._now_s += base_s + row_s * num_rows


CLOCK = Clock()
"""One for the process: a module that has bound a function of `time` while it was replaced keeps it."""


@contextmanager
def simulated() -> Generator[None]:
    """Time forwards of the block by our own clock; enter it before anything imports an engine."""
    kept = (time.monotonic, time.perf_counter)
    time.monotonic = time.perf_counter = CLOCK.now
    from specsplit.model import loader
    from specsplit.model.runner import Runner

    # Classes and modules whose functions are replaced: to the type checker they are of any type.
    runner_class: Any = Runner
    forward, load_model = Runner.forward, loader.load_model
    roles: dict[Any, str] = {}

    def timed_forward(runner: Any, entries: Any) -> Any:
        CLOCK.pass_forward(roles.get(runner, "target"), sum(len(entry.token_ids) for entry in entries))
        return forward(runner, entries)

    def load_with_role(source: str, *, role: Any, **options: Any) -> Any:
        model = load_model(source, role=role, **options)
        roles[model.runner] = role
        return model

    runner_class.forward, loader.load_model = timed_forward, load_with_role
    try:
        yield
    finally:
        runner_class.forward, loader.load_model = forward, load_model
        time.monotonic, time.perf_counter = kept
