"""Files, classes and functions that may exceed a budget, each with its reason: at most five, C901 waivers included."""

from __future__ import annotations

MAX_EXCEPTIONS = 5
EXCEPTIONS: dict[str, str] = {}
"""Keys look like `specsplit/x.py`, or `specsplit/x.py::name` for a class or a function."""
