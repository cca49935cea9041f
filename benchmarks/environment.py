"""The origin of a result: commit, versions, machine, time. Part of every JSON line."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from specsplit.core.errors import MissingExtra

_ROOT = Path(__file__).parent.parent
_UNKNOWN = "unknown"
_NEEDED = ("torch", "scipy", "matplotlib", "jinja2")
_PACKAGES = ("specsplit", "torch", "transformers", "numpy")


def provenance() -> dict[str, object]:
    """Return the facts that a reader needs to judge or repeat a result, in JSON types."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "has_uncommitted_changes": _git("status", "--porcelain") not in ("", _UNKNOWN),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.platform(),
            "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        },
    }


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
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
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
