"""Records that a round makes by the dozen: frozen for the type checker, plain at run time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(kind: type[T]) -> type[T]:
    """Make a dataclass with slots, equality and a hash, whose fields are never set again.

    The type checker enforces that, not the run time.
    """
    # A frozen dataclass sets each field by a call to object.__setattr__, so that it takes five times as long to make.
    return dataclass(slots=True, unsafe_hash=True)(kind)
