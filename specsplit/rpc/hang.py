"""When a process of this machine counts as hung: it answers no pings, though it had a processor. Knows no service.

Whoever kills a process because the machine was busy makes the machine busier. So a ping does not count if a thread of
the process, or of this one, waited for a processor for most of it. Linux says so; elsewhere every ping counts.
One that loads a model answers no ping yet; it hangs if it neither computes nor reads for minutes, as far as Linux says.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

LOOK_S = 1.0
"""Period of pings, and the time for an answer."""
MAX_SILENT = 5
"""Unanswered pings in a row after which a process counts as hung."""
MAX_STARVED = 60
"""Further pings that may be unanswered because there was no processor."""
SILENT = "it does not answer."
STALLED_S = 180.0
"""Time without any work after which a process that loads counts as hung: longer than storage or a hub pauses."""
STILL_LOADING_S = 60.0
"""Period of saying how long a process has been loading."""
_Thread = tuple[bool, int, int]
"""Whether a thread of the process wants a processor now, and nanoseconds for which it had one and waited for one."""


async def wait_hung(look: Callable[[], Awaitable[str | None]], had_to_wait: Callable[[], bool]) -> str:
    """Return why a process has to be killed, once it hangs.

    `look` pings it, and returns what is wrong, SILENT if it does not answer, None if nothing is. `had_to_wait` says
    whether there was no processor for that, as `ProcessorWaits` does.
    """
    loop, num_silent, num_starved = asyncio.get_running_loop(), 0, 0
    while True:
        next_s = loop.time() + LOOK_S
        why, was_starved = await look(), had_to_wait()
        if why is None:
            num_silent = num_starved = 0
        elif why != SILENT:
            return why
        elif was_starved and num_starved < MAX_STARVED:
            num_starved += 1
        else:
            num_silent += 1
            if num_silent == MAX_SILENT:
                return why
        await asyncio.sleep(next_s - loop.time())


async def wait_stalled(pid: int, say_loading: Callable[[float], None]) -> str:
    """Return why a process that loads has to be killed, once it has done no work for STALLED_S.

    `say_loading` is called with its seconds so far every STILL_LOADING_S.
    """
    loop = asyncio.get_running_loop()
    began_s = worked_s = said_s = loop.time()
    work = _work(pid)
    while True:
        await asyncio.sleep(min(LOOK_S, STALLED_S))
        now_s, before, work = loop.time(), work, _work(pid)
        if work != before or not work:
            worked_s = now_s
        elif now_s - worked_s >= STALLED_S:
            return f"it used no processor and read nothing for {STALLED_S:g} s while it loaded."
        if now_s - said_s >= STILL_LOADING_S:
            said_s = now_s
            say_loading(now_s - began_s)


def _work(pid: int) -> list[bytes]:
    """Return the processor time that a process had and the bytes that it read; nothing if the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        lines = Path(f"/proc/{pid}/io").read_bytes().splitlines()
    except OSError:
        return []
    return [*fields[11:13], *(line for line in lines if line.startswith((b"rchar", b"read_bytes")))]


class ProcessorWaits:
    """The time for which threads of the process `pid`, and of this one, wait for a processor."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._read_ns, self._threads = time.monotonic_ns(), self._read()

    def were_long(self) -> bool:
        """Return whether a thread waited for more than half of the time since the last call."""
        before_ns, before = self._read_ns, self._threads
        self._read_ns, self._threads = time.monotonic_ns(), self._read()
        length_ns = self._read_ns - before_ns
        return any(
            _waited_ns(before.get(thread, now), now, length_ns) > length_ns / 2 for thread, now in self._threads.items()
        )

    def _read(self) -> dict[Path, _Thread]:
        found: dict[Path, _Thread] = {}
        for pid in (self._pid, os.getpid()):
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    ran_ns, waited_ns = map(int, (thread / "schedstat").read_text(encoding="ascii").split()[:2])
                    # The name in parentheses may contain anything, blanks and parentheses included.
                    state = (thread / "stat").read_bytes().rpartition(b")")[2].split()[0]
                except (OSError, ValueError):
                    continue  # it has ended, or the system does not say
                # The thread that reads this has a processor.
                found[thread] = state == b"R" and pid == self._pid, ran_ns, waited_ns
        return found


def _waited_ns(before: _Thread, now: _Thread, length_ns: int) -> int:
    """Return how long a thread waited."""
    counted_ns = now[2] - before[2]
    # The system counts a wait when it is over; whoever wants a processor all the time waits while it has none.
    return max(counted_ns, length_ns - (now[1] - before[1])) if before[0] and now[0] else counted_ns
