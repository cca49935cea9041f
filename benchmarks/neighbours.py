"""How much of the machine others used while we measured: a figure from a busy machine should say so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_PROC = Path("/proc")
_STEAL = 7
"""Among the columns of /proc/stat: what the hypervisor gave to others."""
_IDLE = (3, 4)


class Neighbours:
    """Watches the processors from its making on; Linux only, elsewhere it knows nothing."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = (os.getpid(), *pids)
        self._machine, self._own = _machine_ticks(), sum(map(_process_ticks, self._pids))

    def share(self) -> float | None:
        """Return the fraction of all processor time that neither we used nor was idle; None if it is not known."""
        before, now = self._machine, _machine_ticks()
        if before is None or now is None:
            return None
        passed = [after - earlier for after, earlier in zip(now, before, strict=True)]
        busy = sum(passed) - sum(passed[column] for column in _IDLE)
        return max(0.0, busy - (sum(map(_process_ticks, self._pids)) - self._own)) / max(1, sum(passed))


def _machine_ticks() -> list[int] | None:
    try:
        fields = (_PROC / "stat").read_text(encoding="utf-8").splitlines()[0].split()
    except OSError:
        return None
    return [int(field) for field in fields[1 : _STEAL + 2]]


def _process_ticks(pid: int) -> int:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # user and system time
