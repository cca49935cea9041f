"""A load takes less time with a value that another thread computes meanwhile, and without garbage collections."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Meanwhile(Generic[T]):
    """A value that is computed once, on a thread of its own if it is started before it is asked for."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._future: Future[T] | None = None

    def start(self) -> None:
        """Begin on a thread, unless it has begun."""
        if self._future is None:
            self._future = future = Future()
            threading.Thread(target=self._compute, args=(future,), name="specsplit-load").start()

    def result(self) -> T:
        """Return the value once it is there, or raise what the function raises."""
        if self._future is None:
            self._future = Future()
            self._compute(self._future)
        return self._future.result()

    def _compute(self, future: Future[T]) -> None:
        try:
            future.set_result(self._function())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the value gets it
            future.set_exception(error)


@contextmanager
def without_collections() -> Generator[None]:
    """Let Python's garbage collector rest: imports and loads make objects that stay, and it would look at them all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
