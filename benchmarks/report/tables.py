"""Tables and the words in their cells, for the terminal and the page alike. Knows no results file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report.plots import Plot
from benchmarks.statistics import range_of

NONE = "–"
Cells = Sequence[str]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column is text and whose others are numbers."""

    title: str
    columns: Cells
    rows: list[Cells]
    is_folded: bool = False
    """Whether the page shows it only when it is opened, and the terminal not at all."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; a warning stands out."""

    content: str
    is_warning: bool = False


@dataclass(slots=True)
class Section:
    """A part of the page in order: text, tables, plots."""

    title: str
    parts: list[Text | Table | Plot] = field(default_factory=list[Text | Table | Plot])

    def text(self, content: str) -> None:
        """Add a paragraph."""
        self.parts.append(Text(content))

    def warn(self, content: str) -> None:
        """Add a paragraph that stands out."""
        self.parts.append(Text(content, is_warning=True))

    def table(self, title: str, columns: Cells, rows: Iterable[Cells], *, is_folded: bool = False) -> None:
        """Add a table; nothing if it has no rows."""
        self.add([Table(title, columns, list(rows), is_folded)])

    def add(self, parts: Iterable[Table | Plot]) -> None:
        """Add tables that have rows, and plots."""
        self.parts += [part for part in parts if isinstance(part, Plot) or part.rows]

    def facts(self, title: str, facts: Record) -> None:
        """Add names and values, folded."""
        self.table(title, ("", ""), [(name, shown(value)) for name, value in flat(facts)], is_folded=True)

    def origin(self, header: Record) -> None:
        """Add the facts that a reader needs to repeat the measurement."""
        for name in ("settings", "models", "provenance"):
            if name in header:
                self.facts(name.capitalize(), header[name])

    @property
    def plots(self) -> list[Plot]:
        return [part for part in self.parts if isinstance(part, Plot)]


def flat(facts: Record, before: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested facts, each under its whole name."""
    found: list[tuple[str, Any]] = []
    for name, value in facts.items():
        found += flat(value, f"{before}{name} ") if isinstance(value, Mapping) else [(f"{before}{name}", value)]
    return found


def shown(value: Any) -> str:
    """Return a setting as people write it."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or NONE
    return str(value)


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """Return a number, or a dash if there is none."""
    return NONE if value is None else f"{value * scale:.{digits}f}"


def spread(value: Record | None, digits: int = 2) -> str:
    """Return a median with the range of the rounds, or a dash."""
    if value is None:
        return NONE
    low, high = range_of(value)
    return f"{value['median']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def inflated(settings: Record) -> str:
    """Return " (inflated)" behind the name of a target that is."""
    return " (inflated)" if settings.get("is_inflated") else ""


def threads_of(header: Record, of_older: str) -> str:
    """Return the threads of the systems in words; `of_older` says whose they are on loopback in older files."""
    settings, facts = header["settings"], header.get("systems") or {}
    named = f"{settings['threads']} thread{'s' if settings['threads'] > 1 else ''}"
    places = [name for name in settings.get("systems", facts) if name.endswith(("@loopback", "@apart"))]
    if not places:
        return named
    shares = [facts.get(name, {}).get("threads") for name in places]
    told = [f"{name} {share}" for name, share in zip(places, shares, strict=True)]
    return f"{named} ({of_older if None in shares else 'workers together: ' + ', '.join(told)})"


def models_of(settings: Record) -> str:
    """Return target and draft of a measurement in words."""
    without_lookup = "" if settings.get("lookup", True) else ", without lookup"
    return f"Target {settings['target']}{inflated(settings)}, draft {settings['draft'] or 'none'}{without_lookup}"
