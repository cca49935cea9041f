"""Runs one function as a command of its own, with the exit codes of `python -m benchmarks`. Knows no benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from specsplit.core.errors import SpecSplitError

INTERRUPTED = 130


def run_command(command: Callable[..., None], name: str) -> None:
    """Parse the command line for `command`; exit 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    try:
        app(prog_name=name)
    except SpecSplitError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        sys.exit(INTERRUPTED)
