"""The command `compare`, and its table in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from benchmarks.report import console as report
from benchmarks.report.tables import Table
from benchmarks.research.app import app

if TYPE_CHECKING:
    from benchmarks.research.comparison.judge import Comparison

ResultsPath = Annotated[Path, typer.Argument(help="A results file of `run`.", dir_okay=False)]


@app.command()
def compare(
    before: ResultsPath,
    after: ResultsPath,
    force: Annotated[bool, typer.Option("--force", help="Compare runs of different settings all the same.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line to stdout, the table to stderr.")] = False,
) -> None:
    """Say what changed between two results files of `run` beyond noise."""
    from benchmarks import results_file
    from benchmarks.research.comparison import judge

    found = judge.compare(results_file.read(before), results_file.read(after), is_forced=force)
    show_comparison(report.new_console() if as_json else Console(width=None if sys.stdout.isatty() else 140), found)
    if as_json:
        report.emit(found.to_dict(), None)


def show_comparison(console: Console, found: Comparison) -> None:
    """Print the conditions, every metric with its interval, and last the changes."""
    first, second = found.num_rounds
    notes = [
        f"{first} and {second} rounds; times are divided by those of {found.reference} beside them.",
        f"Intervals hold for all rows together at {found.confidence:.1%}.",
        *(f"Different: {each}" for each in found.settings),
        *found.notes,
    ]
    rows = [
        (
            f"{change.system} {change.metric}",
            f"{change.before:.4g}",
            f"{change.after:.4g}",
            f"{change.ratio:.3f}",
            f"[{change.low:.3f}, {change.high:.3f}]",
            change.verdict,
            "any" if change.detectable is None else f"{change.detectable:.0%}",
        )
        for change in found.changes
    ]
    changes = [
        f"{change.system}: {change.metric} is {change.verdict}, {change.ratio:.3f} of its former value."
        for change in found.changed
    ]
    for note in notes:
        console.print(note, markup=False)
    columns = ("system, metric", "before", "after", "ratio", "interval", "", "would find")
    report.show_tables(console, [Table("After / before", columns, rows)])
    console.print(f"Times and rates are in tokens of {found.reference}: 1 is the time of one of its tokens.")
    for line in changes or ["Nothing changed beyond noise."]:
        console.print(line, markup=False)
