"""The options and variables of every command that ask for spans."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from specsplit.cli.logs import note
from specsplit.telemetry import setup


def tracing(given: Mapping[str, Any], role: str) -> AbstractContextManager[None]:
    """Record spans for the length of the block if `given` names a file for them, or the environment a collector.

    A worker that another process of ours has started gets the name of that one's file, and appends its role.
    """
    trace_file = given.get("trace_file")
    if trace_file and given.get("parent") is not None:
        trace_file = f"{trace_file}.{role}"
        note(f"Its spans go to {trace_file}.")
    return setup.tracing(role, Path(trace_file) if trace_file else None)
