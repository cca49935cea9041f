"""The step from a command's options to the function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer

from specsplit.assembly.other_names import as_option
from specsplit.assembly.other_values import refuse_other_values
from specsplit.cli import options


def run_given(run: Callable[[Mapping[str, Any]], int], ctx: typer.Context) -> int:
    """Run a command with the options on its command line and return its exit code.

    Raises:
        InvalidSettings: a value is one of another program.
    """
    given = options.given(ctx)
    refuse_other_values(given, as_option)
    return run(given)
