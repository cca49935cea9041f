"""A request to a head: what one in another process answers with, or what a GPU looks for beside its logits."""

from __future__ import annotations

from typing import Protocol


class HeadWork(Protocol):
    """Tells a head what to do with wanted rows; from another process what comes back stands where logits would."""

    def of_first(self, count: int) -> HeadWork:
        """Return the request for the first `count` of the wanted rows."""
        ...
