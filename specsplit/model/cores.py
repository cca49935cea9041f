"""The cores of this machine that are this process's. Knows no model."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Return the cores that this process may use: a container or `taskset` may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
