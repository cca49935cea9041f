"""Reports of what a request waits for: its place in a queue, how far its prefill is, or when it is asked again.

The listener travels with the context of the caller, like a trace, in process and over a stream alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The place in a queue (`position` from 1, of `queued`), a refusal to wait out, or `done` of `total` tokens."""

    queued: int = 0
    position: int = 0
    done: int = 0
    total: int = 0
    retry_after_s: float = 0.0


Listener = Callable[[Progress], None]
_listener: ContextVar[Listener | None] = ContextVar("progress_listener", default=None)


def current_listener() -> Listener | None:
    """Return the listener of this context; it is called on the event loop."""
    return _listener.get()


@contextmanager
def listening(listener: Listener | None) -> Generator[None]:
    """Let `listener` hear what calls begun in this block report."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
