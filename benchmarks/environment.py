"""The origin of a result: commit, versions, machine, time, and how much of the machine others used meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specsplit.core.errors import InvalidRequest, MissingExtra

_ROOT = Path(__file__).parent.parent
_UNKNOWN = "unknown"
_WRITTEN = (":!benchmarks/results", ":!docs/plots")
"""Folders that a measurement or its report writes; changes there change no measurement."""
_NEEDED = ("torch", "scipy", "matplotlib", "jinja2")
_PROC = Path("/proc")
_STEAL = 7
"""Among the columns of /proc/stat: what the hypervisor gave to others."""
_IDLE = (3, 4)
_PACKAGES = ("specsplit", "torch", "transformers", "numpy")


def provenance() -> dict[str, object]:
    """Return the facts that a reader needs to judge or repeat a result, in JSON types."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        # Where git does not answer in time, nobody knows that there are none.
        "has_uncommitted_changes": _git("status", "--porcelain", "--", ".", *_WRITTEN) != "",
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.platform(),
            "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        },
    }


def is_clean(origin: Mapping[str, Any]) -> bool:
    """Return whether a result with this provenance can be had again: its commit is known, and nothing was changed."""
    return origin.get("commit") != _UNKNOWN and not origin.get("has_uncommitted_changes")


def require_clean(path: Path, origins: Iterable[Mapping[str, Any]]) -> None:
    """Refuse results of changes that are in no commit.

    Raises:
        InvalidRequest: naming the remedies.
    """
    if not all(map(is_clean, origins)):
        raise InvalidRequest(
            f"{path} was measured with changes that are in no commit, so nobody can repeat it; commit and measure "
            "again, or look at it all the same with --uncommitted.",
            param="file",
        )


def commit() -> str:
    """Return the checkout's commit, "unknown" outside a checkout."""
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return answer.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _UNKNOWN


def _cpu_model() -> str:
    try:
        lines = (_PROC / "cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or _UNKNOWN
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or _UNKNOWN)


def require_bench_extra() -> None:
    """Refuse to measure or to report without the packages of the extra `bench`.

    Raises:
        MissingExtra: naming the remedy.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"Benchmarks need {', '.join(missing)}, not installed here: pip install 'specsplit[bench]'.")


class Neighbours:
    """Watches the processors from its making on; knows nothing but on Linux, and if None stands for unknown `pids`."""

    def __init__(self, pids: Sequence[int] | None) -> None:
        self._pids = (os.getpid(), *(pids or ()))
        self._machine, self._own = None if pids is None else _machine_ticks(), sum(map(_process_ticks, self._pids))

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
