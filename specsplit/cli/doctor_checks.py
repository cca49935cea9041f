"""The result of one of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table: the thing checked, whether it is in order, and what was found or has to be done."""

    name: str
    is_ok: bool
    detail: str
    is_warning: bool = False
    """The thing works, but less well than it could."""

    @property
    def state(self) -> str:
        """Word of the table's column, with rich's marks."""
        if not self.is_ok:
            return "[bold red]fails[/bold red]"
        return "[yellow]warns[/yellow]" if self.is_warning else "[green]ok[/green]"
