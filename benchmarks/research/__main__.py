"""The command line of research: training the pair, and the studies. Tables go to stderr, JSON lines to stdout."""

from __future__ import annotations

import sys

import typer

from benchmarks.one_command import INTERRUPTED
from benchmarks.research import context_growth, tree_shapes
from benchmarks.research.calibration.study import calibration
from benchmarks.research.coupling.study import coupling_study
from benchmarks.research.train_pair.commands import app as train_pair
from benchmarks.research.train_pair.workspace import Interrupted
from specsplit.core.errors import SpecSplitError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def describe() -> None:
    """Train the embedded pair, or repeat a study that the documentation quotes."""


app.add_typer(train_pair, name="train-pair")
app.command("coupling")(coupling_study)
app.command()(calibration)
app.command("context-growth")(context_growth.main)
app.command("sweep-tree")(tree_shapes.sweep_tree)


def main() -> None:
    """Run the command line; exit 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        app(prog_name="python -m benchmarks.research")
    except SpecSplitError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except (Interrupted, KeyboardInterrupt) as stopped:
        typer.echo(str(stopped) or "Interrupted.", err=True)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
