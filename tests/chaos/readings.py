"""What a process holds at one moment: memory, descriptors and threads by the kernel, the rest by its own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx2 as httpx

from tests.support.metrics import samples_of

Reading = Mapping[str, float]
"""Values by the name of their quantity."""
_PAGES = {
    "sessions": ("specsplit:num_requests_running",),
    "waiting": ("specsplit:num_requests_waiting",),
    "slots": ("specsplit:num_slots_used",),
    "warm slots": ("specsplit:num_slots_warm",),
    "work": ("specsplit:num_tasks_running",),
    "tasks": ("specsplit:event_loop_tasks",),
}
"""Metrics of each quantity; a process has only some of them."""
MEMORY, KV_CACHE = "MB", "KV MB"
"""The memory of a process beside its KV cache, and that of the cache: more or less, as warm slots come and go."""
_OF_KV_CACHES = "nh"
"""The mark of mappings without huge pages: nothing else in our processes asks for that."""
_LIMIT_S = 30.0


async def read(pid: int, page: str | None) -> Reading:
    """Return what a process holds; `page` is the address of its metrics, where it has some."""
    reading = _of_kernel(pid)
    if page is None:
        return reading
    # Without TLS, since a context for it costs more than the answer.
    async with httpx.AsyncClient(timeout=_LIMIT_S, verify=False) as client:
        samples = samples_of((await client.get(f"http://{page}/metrics")).text)
    for quantity, names in _PAGES.items():
        found = [count for (name, _), count in samples.items() if name in names]
        if found:
            reading[quantity] = sum(found)
    return reading


def _of_kernel(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        **_memory(Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def _memory(mappings: str) -> dict[str, float]:
    found, resident = {MEMORY: 0.0, KV_CACHE: 0.0}, 0
    for line in mappings.splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss":
            resident = int(rest.split()[0])
        elif name == "VmFlags":  # the last line of a mapping
            found[KV_CACHE if _OF_KV_CACHES in rest.split() else MEMORY] += resident * 1024 / 1e6
    return found
