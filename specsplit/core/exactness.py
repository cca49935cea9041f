"""Whether forwards of several workers have the same bits, from what each says of itself. Knows no worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

Exactness = Literal["bits", "near ties"]
"""Whether a row has the same bits in any company, or only up to near ties of the logits."""


class Computing(Protocol):
    """Whoever runs forwards: a worker, a stage, a runner, a result."""

    @property
    def exactness(self) -> Exactness:
        """Return "bits" if a row's result was proved to depend on the row and the tokens before it alone."""
        ...

    @property
    def numerics(self) -> str:
        """Return the fingerprint of processor features, torch version, dtype and block widths; empty if unknown."""
        ...


def joint_exactness(parts: Iterable[Computing]) -> Exactness:
    """Return the exactness of what all of `parts` computed together: "bits" if all say so, with the same numerics."""
    parts = list(parts)
    return "bits" if joint_numerics(parts) and all(part.exactness == "bits" for part in parts) else "near ties"


def joint_numerics(parts: Iterable[Computing]) -> str:
    """Return the numerics that all of `parts` have, empty if they differ or are unknown."""
    numerics = {part.numerics for part in parts}
    return numerics.pop() if len(numerics) == 1 else ""


def shown_exactness(part: Computing) -> str:
    """Return exactness and numerics in words."""
    return f"{part.exactness}, numerics {part.numerics or 'unknown'}"
