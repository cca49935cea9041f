"""The options and variables of every command that ask for spans."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from specsplit.telemetry import setup


def tracing(given: Mapping[str, Any], role: str) -> AbstractContextManager[None]:
    """Record spans for the length of the block if `given` names a file for them, or the environment a collector."""
    trace_file = given.get("trace_file")
    return setup.tracing(role, Path(trace_file) if trace_file else None)
