"""The command line of research: training the pair, and the studies. Tables go to stderr, JSON lines to stdout."""

from __future__ import annotations

import sys

import typer

from benchmarks.research import (
    ablation,
    bars,
    context_growth,
    device_rates,
    draft_window,
    figures,
    inflate,
    long_prompt,
    network_bars,
    rounding,
    tree_shapes,
)
from benchmarks.research.app import app
from benchmarks.research.calibration import study as calibration
from benchmarks.research.checkouts import compare as checkouts
from benchmarks.research.checkouts import forwards
from benchmarks.research.comparison import command as comparison
from benchmarks.research.coupling import study as coupling
from benchmarks.research.drafts import kinds as draft_kinds
from benchmarks.research.exactness import families
from benchmarks.research.exactness import study as exactness
from benchmarks.research.real_shapes import command as real_shapes
from benchmarks.research.rounds import critical_path, overhead, profile
from benchmarks.research.stages import cost as stage_cost
from benchmarks.research.stages import sessions as stage_sessions
from benchmarks.research.train_pair.commands import app as train_pair
from benchmarks.research.train_pair.workspace import Interrupted
from specsplit.core.errors import SpecSplitError

INTERRUPTED = 130
STUDIES = (
    ablation,
    bars,
    calibration,
    checkouts,
    comparison,
    context_growth,
    coupling,
    critical_path,
    device_rates,
    draft_kinds,
    draft_window,
    exactness,
    families,
    figures,
    forwards,
    inflate,
    long_prompt,
    network_bars,
    overhead,
    profile,
    real_shapes,
    rounding,
    stage_cost,
    stage_sessions,
    tree_shapes,
)
"""Importing a study adds its command to the application."""

app.add_typer(train_pair, name="train-pair")


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
