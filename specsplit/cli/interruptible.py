"""A command that Ctrl-C ends with a word to the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer

from specsplit.assembly.other_names import as_option
from specsplit.assembly.other_values import refuse_other_values
from specsplit.cli import options

INTERRUPTED = 130
"""The exit code."""


def interruptible(run: Callable[[Mapping[str, Any]], int], ctx: typer.Context) -> int:
    """Run a command and return its exit code; Ctrl-C before there is any text ends here, with a word to the user."""
    # typer would turn Ctrl-C into a silent exit.
    try:
        given = options.given(ctx)
        refuse_other_values(given, as_option)
        return run(given)
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        return INTERRUPTED
