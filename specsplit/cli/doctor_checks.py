"""What the doctor says of one thing it looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table: what was looked at, whether it is well, and what was found or has to be done."""

    name: str
    is_ok: bool
    detail: str
    is_warning: bool = False
    """It works, but less well than it could."""

    @property
    def state(self) -> str:
        """The word for it, with rich's marks."""
        if not self.is_ok:
            return "[bold red]fails[/bold red]"
        return "[yellow]warns[/yellow]" if self.is_warning else "[green]ok[/green]"
