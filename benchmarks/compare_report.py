"""The table of `compare`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from benchmarks.compare import CONFIDENCE, Comparison
from benchmarks.report import table


def show(console: Console, found: Comparison) -> None:
    """Print what was compared, every metric with its interval, and last what changed."""
    first, second = found.num_rounds
    console.print(
        f"{first} and {second} rounds; times are divided by those of {found.reference} beside them; "
        f"intervals hold for all rows together at {CONFIDENCE:.1%}.",
        markup=False,
    )
    for note in [*(f"Different: {each}" for each in found.settings), *found.notes]:
        console.print(note, markup=False)
    listed = table("After / before", "system", "metric", "before", "after", "ratio", "interval", "", "would find")
    listed.columns[1].justify = "left"
    for change in found.changes:
        listed.add_row(
            escape(change.system),
            change.metric,
            f"{change.before:.4g}",
            f"{change.after:.4g}",
            f"{change.ratio:.3f}",
            f"[{change.low:.3f}, {change.high:.3f}]".replace("[", r"\["),
            change.verdict,
            "any" if change.detectable is None else f"{change.detectable:.0%}",
        )
    console.print(listed)
    console.print(
        f"Times and rates are in tokens of {found.reference}: what takes 1 takes as long as one of its tokens."
    )
    if not found.changed:
        console.print("Nothing changed beyond noise.")
    for change in found.changed:
        console.print(
            f"{change.system}: {change.metric} is {change.verdict}, {change.ratio:.3f} of what it was.", markup=False
        )
