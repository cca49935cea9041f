"""Paths as a user writes them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return `path` with its ~ replaced; that of a user who does not exist stays, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (Path.expanduser raises for a user who does not exist)
