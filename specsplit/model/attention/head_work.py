"""A request to a head: what one in another process answers with, or what a GPU looks for beside its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class HeadWork(Protocol):
    """Tells a head what to do with wanted rows; from another process what comes back stands where logits would."""

    def of_rows(self, first: int, count: int) -> HeadWork:
        """Return the request for `count` of the wanted rows, from `first` on."""
        ...

    def join(self, answers: Sequence[Any]) -> Any:
        """Return the answer for rows that were asked for in parts, in their order."""
        ...
