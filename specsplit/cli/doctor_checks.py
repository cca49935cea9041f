"""The result of one of the doctor's checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ParamSpec

from specsplit.core.errors import SpecSplitError
from specsplit.core.exactness import Computing, shown_exactness
from specsplit.core.settings import Settings
from specsplit.core.types import Identity

P = ParamSpec("P")


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


def guarded(name: str, part: Callable[P, Iterable[Check]], *arguments: P.args, **named: P.kwargs) -> Iterator[Check]:
    """Yield the checks of a part; an error that ends it is a failed check called `name`, and ends no other part."""
    try:
        yield from part(*arguments, **named)
    except SpecSplitError as error:
        yield Check(name, False, str(error))


def is_coordinator(settings: Settings) -> bool:
    """Whether these settings are for a target here whose layers are on stages elsewhere."""
    return bool(settings.target.stages) and not settings.is_remote


def exactness_check(role: str, worker: Computing, reason: str = "") -> Check:
    """Return the line about the bits of a worker's forwards; `reason` is a sentence about how that is known."""
    shown = shown_exactness(worker)
    return Check(f"{role} exactness", True, f"{shown}: {reason}" if reason else shown)


def revision_checks(role: str, worker: Identity) -> list[Check]:
    """Return the line about the commit that a worker's model is of, if it is from the hub and the worker says so."""
    revision = worker.model_revision
    return [Check(f"{role} revision", True, f"{revision} of {worker.model}")] if revision else []


def no_draft_check(settings: Settings) -> Check:
    """Return the line about a target that has no draft, and what it does without one."""
    if not settings.speculates:
        return Check("draft", True, "none: decoding is plain")
    option = "--draft" if settings.is_remote else "--draft-model"
    how = "none: trees come from lookup alone, which gains where a text repeats itself"
    # A far target also takes steps by itself in auto, which hides the round trip.
    alone = ", and a target that is far away takes steps by itself" if settings.is_remote else ""
    by_choice = settings.orchestrator.mode == "lookup"
    return Check("draft", True, f"{how}{alone}" + ("" if by_choice else f"; name one with {option}"))
