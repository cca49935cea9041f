"""The help of a command: `-h` shows its usual options, and `--help-all` every one."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from specsplit.cli.logs import json_formatter, note

HELP_NAMES = {"help_option_names": ["-h", "--help", "--help-all"]}
"""The settings of the parser by which `-h` and `--help-all` are `--help`, where no option is hidden; subcommands
inherit them."""
USUAL = frozenset(
    (
        *("text", "prompt", "prompt_file", "prompts_file", "output", "chat", "max_new_tokens", "temperature", "seed"),
        *("mode", "compare", "target_model", "draft_model", "model", "dtype", "device", "context", "config"),
        *("target", "draft", "listen", "http", "api_key_file", "sessions", "layers", "stages", "local_stages"),
        *("endpoint", "system", "raw", "json", "help_all", "help"),
    )
)
"""Names of the parameters that `-h` shows."""


_FILE_WIDTH = 160
"""Columns of a help that is read by no terminal."""


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""


class Group(TyperGroup):
    """A group of commands, which Ctrl-C ends with a word, and whose help shows no type behind flags."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the command line; typer imports pydantic for that."""
        with _interruptible():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with _interruptible():
            return super().invoke(ctx)

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names of the help in one order; the parser has them in a set."""
        return sorted(super().get_help_option_names(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _prepare(self.get_params(ctx))
        super().format_help(ctx, formatter)


class ShortCommand(TyperCommand):
    """A command with so few options that `-h` shows all of them."""

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names of the help in one order; the parser has them in a set."""
        return sorted(super().get_help_option_names(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _prepare(self.get_params(ctx))
        super().format_help(ctx, formatter)


class Command(ShortCommand):
    """A command with so many options that `-h` shows the usual ones only."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; an option that is not usual is left out unless all were asked for."""
        if not ctx.meta.get(_ALL):
            # Hidden only for this print: completion offers the other options as well.
            for param in self.params:
                if isinstance(param, TyperOption) and param.name not in USUAL:
                    param.hidden = True
        super().format_help(ctx, formatter)


@contextmanager
def _interruptible() -> Generator[None]:
    """End the block at Ctrl-C with a word to the user, where typer would be silent."""
    try:
        yield
    except KeyboardInterrupt:
        if json_formatter() is not None:
            note("Interrupted.")
        else:
            typer.echo("Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _prepare(params: Sequence[Any]) -> None:
    """Show whole names, and no type behind flags, which take no value; for typer it would be <bool>."""
    from typer import rich_utils  # late, as rich takes a while and only a help needs it

    class WholeNames(rich_utils.OptionHighlighter):
        def __call__(self, text: Any) -> Any:
            found = super().__call__(text)
            found.overflow = "fold"  # a name that is wider than its column goes on in the next line
            return found

    rich_utils.highlighter = WholeNames()
    if rich_utils.MAX_WIDTH is None and "COLUMNS" not in os.environ and not sys.stdout.isatty():
        rich_utils.MAX_WIDTH = _FILE_WIDTH
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = " "


_ALL = "specsplit.help_all"


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", "-V", is_eager=True, help="Print the version and exit.", metavar=" ")
]
HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="Show every option and exit.", is_eager=True, callback=_show_all, metavar=" "),
]
