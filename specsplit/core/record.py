"""Records that a round makes by the dozen: frozen to the type checker, plain at run time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(kind: type[T]) -> type[T]:
    """Make a dataclass with slots, equality and a hash, whose fields nobody sets again.

    The type checker sees to that. A frozen one would as well, and takes five times as long to make: it sets each
    field by a call.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
