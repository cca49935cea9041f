"""One row of the table: what is measured, its value, its bar, and the places that miss it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    """A measured value beside its bar; without a bar it is shown for information only."""

    name: str
    value: str
    bar: str = ""
    is_met: bool = True
    places: Sequence[str] = ()


def none_of(name: str, places: Sequence[str]) -> Measure:
    """Return the measure of a rule that no place may break."""
    return Measure(name, str(len(places)), "0", not places, places)


def at_most(name: str, value: float, bar: int, places: Sequence[str] = ()) -> Measure:
    """Return the measure of a number that must not exceed `bar`."""
    return Measure(name, f"{value:g}", f"<= {bar}", value <= bar, places)


def table(measures: Sequence[Measure], num_places: int | None) -> str:
    """Return the table as text; at most `num_places` places of each missed rule are listed below it, None lists all."""
    rows = [("", "measure", "value", "bar")]
    rows += [(_mark(measure), measure.name, measure.value, measure.bar) for measure in measures]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for measure in measures:
        if not measure.is_met and measure.places:
            lines += ["", f"{measure.name}:", *(f"  {place}" for place in measure.places[:num_places])]
            left = len(measure.places) - len(measure.places[:num_places])
            lines += [f"  ... and {left} more (--all lists them)"] if left else []
    return "\n".join(lines)


def _mark(measure: Measure) -> str:
    if not measure.bar:
        return "    "
    return "ok  " if measure.is_met else "MISS"
