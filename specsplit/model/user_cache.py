"""The folder for what is worth keeping between runs; everything in it can be computed or fetched again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Return the user's folder of this project, by the XDG rules, whether it exists or not; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        # In many containers the user has no home.
        return None
    return home / "specsplit"
