"""The table of `draft_kinds`. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.report.console import table
from benchmarks.report.tables import spread
from benchmarks.research.cells import show_neighbours

Record = Mapping[str, Any]


def show(console: Console, records: Sequence[Record]) -> None:
    """Print a line per kind of draft."""
    settings, bounds = records[0]["settings"], records[0]["bounds"]
    inflated = " (inflated)" if settings["is_inflated"] else ""
    without_lookup = "" if settings["lookup"] else ", without lookup"
    console.print(
        f"target {settings['target']}{inflated}{without_lookup}, {settings['num_prompts']} prompts x "
        f"{settings['num_new_tokens']} tokens, {settings['threads']} threads each",
        markup=False,
    )
    for record in records:
        show_neighbours(console, record["neighbours_share"])
    listed = table("auto / plain decoding", "draft", "decoding", "with the prompt", "bar", "pairs", "asked", "note")
    for record in records:
        listed.add_row(*row_of(record))
    console.print(listed)
    console.print(
        f"Bar: median >= {bounds['median']:g}, lowest pair >= {bounds['low']:g}, of at least "
        f"{bounds['num_pairs']} pairs. Asked: runs in which the draft computed."
    )


def row_of(record: Record) -> tuple[str, ...]:
    """Return the cells of a record's line."""
    num_runs = record["num_pairs"] * record["settings"]["num_prompts"]
    return (
        record["kind_of_draft"],
        spread(record["ratio"]),
        spread(record["wall_ratio"]),
        {True: "met", False: "MISSED", None: "-"}[record["is_met"]],
        str(record["num_pairs"]),
        f"{record['num_runs_with_draft']} of {num_runs}",
        "; ".join(_notes(record)),
    )


def _notes(record: Record) -> list[str]:
    notes: list[str] = []
    if record["draft"]["slowness"] is not None:
        notes.append(f"{record['draft']['slowness']:.1f} x as slow")
    if not record["is_complete"]:
        notes.append("interrupted")
    if record["num_pairs"] < record["bounds"]["num_pairs"]:
        notes.append("too few pairs to judge")
    if record["num_differences"]:
        notes.append(f"{record['num_differences']} texts differ, {record['num_ties']} at ties")
    return notes
