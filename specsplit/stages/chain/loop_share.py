"""Which packets a stage computes on its event loop: those that take less than handing them to its thread is worth.

A hand-over to the thread and back costs a third of a millisecond, and what follows begins with cold caches. While a
packet is computed the loop answers nobody, so that only short ones are for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from specsplit.model.threads import compute_with
from specsplit.stages.packet import Packet

MOST_ROWS = 32
"""Rows of a packet that the loop may compute: a decode's or a tree's, never a prefill's."""


class LoopShare:
    """Lets the loop compute a packet of a few rows if the last such packet took less than `limit_s`."""

    def __init__(self, limit_s: float, threads: int | None) -> None:
        self._limit_s, self._threads = limit_s, threads
        self._last_s = math.inf
        self._num_on_thread = 0
        self._is_set_up = False

    def takes(self, num_rows: int) -> bool:
        """Return whether the loop computes a packet now: a short one, while the thread has nothing to do."""
        if num_rows > MOST_ROWS or self._num_on_thread or self._last_s >= self._limit_s:
            return False
        if not self._is_set_up:
            self._is_set_up = True
            if self._threads is not None:
                compute_with(self._threads)
        return True

    @contextmanager
    def thread_works(self) -> Generator[None]:
        """Count a piece of work as the thread's for the length of the block."""
        self._num_on_thread += 1
        try:
            yield
        finally:
            self._num_on_thread -= 1

    def measuring(self, compute: Callable[[Packet], Packet], packet: Packet) -> Callable[[], Packet]:
        """Return the computation of a packet, which is measured wherever it is done."""

        def measured() -> Packet:
            began_s = time.perf_counter()
            made = compute(packet)
            # A packet that is refused says nothing about the time of one that is not.
            if packet.num_tokens <= MOST_ROWS:
                self._last_s = time.perf_counter() - began_s
            return made

        return measured
