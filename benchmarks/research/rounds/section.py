"""The section of the page for a profile, and its tables."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.report.console import show_tables
from benchmarks.report.tables import Record, Section, Table, inflated, models_of, number


def of_profile(record: Record, path: Path, name: str) -> Section:
    """Return the section of a profile."""
    section = Section(f"{path.name}: time of a round by part, mode {record['settings']['mode']}")
    section.text(
        f"{models_of(record['settings'])}; {record['num_rounds']} rounds, median "
        f"{record['round_ms']:.2f} ms; in process."
    )
    section.add(profile_tables(record))
    section.origin(record)
    return section


def profile_tables(record: Record) -> list[Table]:
    """Return the parts of a round, and the functions that take most of it."""
    parts = [(part, number(each["ms"], 3), f"{each['share']:.0%}") for part, each in record["parts"].items()]
    functions = [(each["function"], number(each["calls"], 1), number(each["ms"], 3)) for each in record["functions"]]
    return [
        Table("Parts of the time", ("part", "ms per round", "share"), parts),
        Table(
            "Exclusive time by function, with the profiler's own cost",
            ("function", "calls per round", "ms per round"),
            functions,
            is_folded=True,
        ),
    ]


def show_profile(console: Console, record: Record) -> None:
    """Print the parts of a round, the packages and the functions that take most of it."""
    settings = record["settings"]
    console.print(
        f"target {settings['target']}{inflated(settings)}, mode {settings['mode']}: {record['num_rounds']} rounds, "
        f"median {record['round_ms']:.2f} ms, {record['tokens_per_s']:.0f} tokens/s with spans on",
        markup=False,
    )
    parts, functions = profile_tables(record)
    packages = [(name, f"{time_ms:.3f}") for name, time_ms in record["packages"].items() if time_ms >= 0.001]
    title = "Exclusive time of the event loop's thread, profiler's cost included"
    shown = Table(functions.title, functions.columns, functions.rows)
    show_tables(console, [parts, Table(title, ("package", "ms per round"), packages), shown])
