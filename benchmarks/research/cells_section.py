"""The section of the page for a line of `smoke` or `bars`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.registry import BARE
from benchmarks.report import plots, systems
from benchmarks.report.plots import Plot
from benchmarks.report.sections import warn
from benchmarks.report.tables import NONE, Record, Section, Table, models_of, shown, spread
from benchmarks.research.cells import bounds_of


def of_cells(record: Record, path: Path, name: str) -> Section:
    """Return the section of a line of `smoke` or `bars`: rates by system and cell, then the bars."""
    section = Section(f"{path.name}: {record['benchmark']}")
    if not record["is_complete"]:
        section.warn("Not whole: it was interrupted, or a cell failed.")
    warn(section, record, record)
    settings = record["settings"]
    if "cells" in record:
        section.text(
            f"{models_of(settings)}, {settings['dtype']}, {settings['workload']}: {settings['num_prompts']} prompts x "
            f"{settings['num_new_tokens']} tokens, {record['num_rounds']} alternating rounds; medians with ranges."
        )
    # A line from before there were cells is one cell.
    alone = {"temperature": 0, "threads": settings["threads"], "tokens_per_s": record.get("tokens_per_s")}
    rates = {_cell_name(cell): cell["tokens_per_s"] for cell in record.get("cells", [alone])}
    # Older lines have a rate of the bare forward, whose time has no prompt.
    rates = {cell: {name: each for name, each in by.items() if name != BARE} for cell, by in rates.items()}
    title = "Tokens per second, prompt included"
    section.add([Plot(f"{name}-rates", title, plots.bars(title, rates, "tokens/s", digits=0))])
    listed = list(next(iter(rates.values())))
    rows = [(system, *(spread(rates[cell][system], 0) for cell in rates)) for system in listed]
    section.table(title, ("system", *rates), rows)
    section.add(_bar_tables(record["bars"], list(rates)))
    section.text(systems.agreement(record))
    section.add([systems.differences(record)])
    section.origin(record)
    return section


def _bar_tables(bars: Sequence[Record], cells: Sequence[str]) -> list[Table]:
    """Return a table of bars per cell, whose name ends each bar's measure."""
    if not any(bar["measure"].endswith(f", {cell}") for bar in bars for cell in cells):
        return [bar_table(bars)]
    return [
        bar_table(
            [
                {**bar, "measure": bar["measure"].removesuffix(f", {cell}")}
                for bar in bars
                if bar["measure"].endswith(f", {cell}")
            ],
            f"Bars, {cell}",
        )
        for cell in cells
    ]


def _cell_name(cell: Record) -> str:
    return f"T {cell['temperature']:g}, {cell['threads']} thread{'s' if cell['threads'] > 1 else ''}"


def bar_table(bars: Sequence[Record], title: str = "Bars") -> Table:
    """Return bars with their values, bounds and notes."""
    rows = [
        (
            f"{bar['id']}: {bar['measure']}",
            spread(bar["value"]) if isinstance(bar["value"], Mapping) else shown(bar["value"]),
            _range_of_tasks(bar["value"]),
            bounds_of(bar["relation"], bar["bound"], bar.get("lowest")),
            shown(bar["is_met"]),
            bar.get("note", ""),
        )
        for bar in bars
    ]
    return Table(title, ("bar", "found", "prompts", "wanted", "met", "note"), rows)


def _range_of_tasks(value: Any) -> str:
    """Return from where to where the prompts lie; older files, and bars that compare no work, do not say."""
    tasks = value.get("tasks") if isinstance(value, Mapping) else None
    return f"{min(tasks):.2f} to {max(tasks):.2f}" if tasks else NONE
