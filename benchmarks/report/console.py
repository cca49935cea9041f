"""Progress and tables on stderr, one JSON line last on stdout and, with --output, in a file.

Knows no measurement; gets finished records.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table as RichTable

from benchmarks.report.tables import Section, Table, Text
from benchmarks.results_file import Writer

BUSY_SHARE = 0.03


class Progress:
    """A bar on stderr where that is a terminal, nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def running(self, what: str, total: int) -> Generator[Callable[[str], None]]:
        """Show a bar of `total` steps; the caller gets a function that counts one, given its name."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = RichProgress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        with bar:
            task = bar.add_task(what, total=total)
            yield lambda name: bar.update(task, advance=1, description=f"{what}: {name}")


def new_console() -> Console:
    """Return a console on stderr, wide enough for the tables if it is no terminal."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 200, highlight=False)


def table(title: str, *columns: str) -> RichTable:
    """Return an empty table; where it is too wide, its first column of names is whole and the others fold."""
    empty = RichTable(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        empty.add_column(column, justify="right" if index else "left", no_wrap=not index, overflow="fold")
    return empty


def show_tables(console: Console, tables: Iterable[Table]) -> None:
    """Print the tables that are not folded and have rows."""
    for each in tables:
        if each.rows and not each.is_folded:
            listed = table(each.title, *map(escape, each.columns))
            for row in each.rows:
                listed.add_row(*map(escape, row))
            console.print(listed)


def show_section(console: Console, section: Section) -> None:
    """Print the text and the tables that the page would show unfolded."""
    for part in section.parts:
        if isinstance(part, Text):
            console.print(f"{'Warning: ' * part.is_warning}{part.content}", markup=False)
        elif isinstance(part, Table):
            show_tables(console, [part])


def check_output(path: Path | None) -> None:
    """Refuse a results file that cannot be written, before anything is measured.

    Raises:
        InvalidSettings: naming the reason.
    """
    with Writer(path):
        pass


def emit(record: Mapping[str, object], path: Path | None) -> None:
    """Write the record as one JSON line to stdout, and append it to `path`.

    Raises:
        InvalidSettings, ResourceError: the file cannot be written; stdout has the line already.
    """
    print(json.dumps(record, separators=(",", ":")), flush=True)
    with Writer(path) as writer:
        writer.add(record)
