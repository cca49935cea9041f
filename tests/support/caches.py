"""A cache of a test's own, which has the code that this machine has compiled already."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest


def link_kernels(cache: Path, known: Path) -> None:
    """Let a folder of XDG_CACHE_HOME have the compiled kernels of another one."""
    ours, theirs = (folder / "specsplit" / "kernels" for folder in (cache, known))
    with contextlib.suppress(OSError):
        theirs.mkdir(parents=True, exist_ok=True)
    ours.parent.mkdir(parents=True, exist_ok=True)
    if not ours.exists():
        ours.symlink_to(theirs.resolve(), target_is_directory=True)


def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test, and the processes that it starts, keep what they cache in a folder of its own."""
    link_kernels(cache, Path(os.environ["XDG_CACHE_HOME"]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
