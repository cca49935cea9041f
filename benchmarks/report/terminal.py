"""Sections and the comparison of two runs in the terminal."""

from __future__ import annotations

from rich.console import Console

from benchmarks.compare import CONFIDENCE, Comparison
from benchmarks.report.console import show_tables
from benchmarks.report.tables import Section, Table, Text


def show_section(console: Console, section: Section) -> None:
    """Print the text and the tables that the page would show unfolded."""
    for part in section.parts:
        if isinstance(part, Text):
            console.print(f"{'Warning: ' * part.is_warning}{part.content}", markup=False)
        elif isinstance(part, Table):
            show_tables(console, [part])


def show_comparison(console: Console, found: Comparison) -> None:
    """Print the conditions, every metric with its interval, and last the changes."""
    first, second = found.num_rounds
    notes = [
        f"{first} and {second} rounds; times are divided by those of {found.reference} beside them.",
        f"Intervals hold for all rows together at {CONFIDENCE:.1%}.",
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
    show_tables(console, [Table("After / before", columns, rows)])
    console.print(f"Times and rates are in tokens of {found.reference}: 1 is the time of one of its tokens.")
    for line in changes or ["Nothing changed beyond noise."]:
        console.print(line, markup=False)
