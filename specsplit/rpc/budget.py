"""Limits the bytes of requests that a server holds at once, over all connections. Knows neither calls nor contents."""

from __future__ import annotations

from specsplit.limits import MAX_REQUEST_BYTES, SMALL_BYTES


class ByteBudget:
    """Bytes that requests may take; large ones leave a quarter to small ones, so that rounds never wait for prompts."""

    def __init__(self, num_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._limit = num_bytes
        self._used = 0

    @property
    def num_used(self) -> int:
        return self._used

    def take(self, num_bytes: int) -> bool:
        """Take room for a request, to be given back later; return False if there is none."""
        # [ small and large: 3/4 | small only: 1/4 ]. A request that comes alone is taken whatever its size, or it never
        # would be.
        limit = self._limit if num_bytes <= SMALL_BYTES else self._limit * 3 // 4
        if self._used and self._used + num_bytes > limit:
            return False
        self._used += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Give back the room of a request."""
        self._used -= num_bytes
