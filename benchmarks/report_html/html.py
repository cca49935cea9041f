"""Tables, lists and numbers as HTML. Knows no results file; escapes whatever it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from benchmarks.plots import Plot

NONE = "–"
Cells = Sequence[str]


@dataclass(slots=True)
class Section:
    """A part of the page: its HTML in order, and the plots that stand in it."""

    title: str
    parts: list[str | Plot] = field(default_factory=list[str | Plot])

    def text(self, content: str, kind: str = "") -> None:
        """Add a paragraph; `kind` "warning" makes it stand out."""
        self.parts.append(f'<p class="{kind}">{escape(content)}</p>' if kind else f"<p>{escape(content)}</p>")

    def heading(self, content: str) -> None:
        self.parts.append(f"<h3>{escape(content)}</h3>")

    def table(self, caption: str, columns: Cells, rows: Iterable[Cells], *, is_folded: bool = False) -> None:
        """Add a table whose first column is text and whose others are numbers; nothing where it has no rows."""
        listed = list(rows)
        if not listed:
            return
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
        body = "".join(
            f'<tr><th scope="row">{escape(row[0])}</th>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in listed
        )
        grid = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        if is_folded:
            self.parts.append(f"<details><summary>{escape(caption)}</summary>{grid}</details>")
        else:
            self.parts.append(f"<h4>{escape(caption)}</h4>{grid}")

    def facts(self, caption: str, facts: Mapping[str, Any]) -> None:
        """Add names and values, folded."""
        self.table(caption, ("", ""), [(name, shown(value)) for name, value in flat(facts)], is_folded=True)

    @property
    def plots(self) -> list[Plot]:
        return [part for part in self.parts if isinstance(part, Plot)]


def flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
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
    """Return a number, or a dash where there is none."""
    return NONE if value is None else f"{value * scale:.{digits}f}"


def spread(value: Mapping[str, Any] | None, digits: int = 2) -> str:
    """Return a median with its interval, or a dash."""
    if value is None:
        return NONE
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def inflated(settings: Mapping[str, Any]) -> str:
    """Return " (inflated)" behind the name of a target that is."""
    return " (inflated)" if settings.get("is_inflated") else ""
