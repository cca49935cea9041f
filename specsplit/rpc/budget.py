"""How many bytes of requests a server takes on at once, over all connections. Knows neither calls nor contents."""

from __future__ import annotations

MAX_REQUEST_BYTES = 64 << 20
"""Of all requests being decoded and served: four of the largest, and a few times as much once they are decoded."""
SMALL_BYTES = 64 << 10
"""A round, or a prompt of some ten thousand tokens."""


class ByteBudget:
    """Room for requests; of it large ones leave a quarter to small ones, so that nobody's rounds wait for prompts."""

    def __init__(self, num_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._limit = num_bytes
        self._used = 0

    @property
    def num_used(self) -> int:
        return self._used

    def take(self, num_bytes: int) -> bool:
        """Take room for a request, to be given back, and return whether there was; one alone always has it."""
        limit = self._limit if num_bytes <= SMALL_BYTES else self._limit * 3 // 4
        if self._used and self._used + num_bytes > limit:
            return False
        self._used += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Give back what was taken."""
        self._used -= num_bytes
