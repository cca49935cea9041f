"""Gives the system what the C library keeps of freed memory, now and then while a device is at work.

A forward's tensors and the code that oneDNN keeps for their numbers of rows lie in the same heap. The code of one
number makes place for another's all the time, and what stays holds the tensors' place in pieces: after a thousand
prompts of all lengths a third of the heap is free. Nothing of it is lost, and its whole pages can be given back.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

from specsplit.model.memory import return_freed

PAUSE_S = 10.0
"""Seconds between two looks while there is no work; what the next forwards take again costs them some milliseconds."""
BUSY_S = 60.0
"""Seconds between two looks while there is: giving back takes some 20 ms."""
MUCH = 8 << 20
"""Bytes by which a process grows before it is worth it."""


def resident_bytes() -> int:
    """Return the memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


class FreedMemory:
    """Gives freed memory back if the process holds MUCH more than when it last did; one thread asks it to."""

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.monotonic,
        resident: Callable[[], int] = resident_bytes,
        give_back: Callable[[], object] = return_freed,
    ) -> None:
        self._now, self._resident, self._give_back = now, resident, give_back
        self._looked_s = now() - PAUSE_S  # the first pause may come at once
        self._least = resident()

    @property
    def wait_s(self) -> float:
        """Seconds that a pause has to last until the next look."""
        return max(0.0, self._looked_s + PAUSE_S - self._now())

    def look_in_pause(self) -> None:
        """Give back what there is: there has been no work for `wait_s`."""
        self._looked_s, resident = self._now(), self._resident()
        if resident - self._least >= MUCH:
            self._give_back()
            self._least = self._resident()
        self._least = min(self._least, resident)

    def look_between_steps(self) -> None:
        """Give back what there is, if there was no pause for BUSY_S."""
        if self._now() - self._looked_s >= BUSY_S:
            self.look_in_pause()
