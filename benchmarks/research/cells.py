"""Cells and warnings that only the studies print in the terminal."""

from __future__ import annotations

from rich.console import Console

from benchmarks.report.console import BUSY_SHARE
from benchmarks.statistics import Estimate


def spread(value: Estimate, digits: int = 2) -> str:
    """Return a median with its range, as the tables show it."""
    return f"{value.median:.{digits}f}  [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def bounds_of(relation: str, bound: float, lowest: float | None) -> str:
    """Return the bounds of a bar, as the tables show them."""
    return f"{relation} {bound:.4g}" + (f", lowest {lowest:.4g}" if lowest is not None else "")


def show_neighbours(console: Console, share: float | None) -> None:
    """Warn of figures from a machine that others were using."""
    if share is not None and share > BUSY_SHARE:
        console.print(f"Warning: others used {share:.0%} of the processors meanwhile; repeat this on a quiet machine.")
