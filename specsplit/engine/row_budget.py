"""The memory of a worker's KV rows: how many each slot may write, and which still hold memory though they are free.

    rows of all slots:  [ reserved by slots | free, but still in memory | free, and given back )    at most `limit` hold

A slot is address space, so its rows are counted here, not its length. Plain arithmetic; only the executor touches it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from specsplit.core.record import record

_SPARE_BYTES = 32 << 20
"""Bytes of free rows that keep their memory for the next session; at most an eighth of all."""
_SPARE_SHARE = 8


class SlotMemory(Protocol):
    """The memory behind slots: a KVCache, or a coordinator's record of those in its stages."""

    @property
    def num_slots(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 if unknown."""
        ...

    @property
    def row_limit(self) -> int:
        """Rows of all slots together that may hold memory."""
        ...

    @property
    def can_return(self) -> bool:
        """Whether `return_rows` gives memory back."""
        ...

    def rows_for(self, num_rows: int) -> int:
        """Return the rows that hold memory if the first `num_rows` of a slot are written."""
        ...

    def return_rows(self, slot: int, start: int) -> None:
        """Give the rows of a slot from `start` on back."""
        ...


@record
class KVStatistics:
    """The memory of a worker's KV rows at one moment."""

    num_rows: int = 0
    """Rows that may hold memory; 0 if nobody counts them."""
    num_reserved: int = 0
    """Rows of sessions, of borrowers and of warm slots."""
    num_warm: int = 0
    """Rows of warm slots among them, which are as good as free."""
    num_touched: int = 0
    """Rows that hold memory: the reserved ones, and free ones that were not given back."""
    row_bytes: int = 0
    num_preempted: int = 0
    """Sessions so far that lost their rows to others."""

    @property
    def budget_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of rows that somebody needs."""
        return (self.num_reserved - self.num_warm) * self.row_bytes

    @property
    def touched_bytes(self) -> int:
        return self.num_touched * self.row_bytes

    @property
    def num_free(self) -> int:
        """Rows that a session may have at once."""
        return self.num_rows - self.num_reserved + self.num_warm


class RowBudget:
    """Reserves rows of slots. Invariant: reserved <= touched for every slot, and sum of touched <= limit."""

    def __init__(self, memory: SlotMemory) -> None:
        self.limit = memory.row_limit
        self.reserved = [0] * memory.num_slots
        """Rows that each slot may write to."""
        self.num_reserved = self.num_touched = 0
        self.row_bytes = memory.row_bytes
        self._memory, self._touched = memory, [0] * memory.num_slots
        spare = _SPARE_BYTES // memory.row_bytes if memory.row_bytes and memory.can_return else 0
        self._max_spare = min(spare, self.limit // _SPARE_SHARE)
        for slot in range(memory.num_slots):  # what was written at load is nobody's
            memory.return_rows(slot, 0)

    @property
    def num_free(self) -> int:
        """Rows that nobody has reserved."""
        return self.limit - self.num_reserved

    def lacking(self, slot: int, num_rows: int) -> int:
        """Return how many rows a slot has yet to reserve for its first `num_rows`."""
        return max(0, self._memory.rows_for(num_rows) - self.reserved[slot])

    def reserved_by(self, slots: Iterable[int]) -> int:
        """Return the rows of these slots together."""
        return sum(self.reserved[slot] for slot in slots)

    def rows_for(self, num_rows: int) -> int:
        """Return what an empty slot reserves for its first `num_rows`."""
        return self._memory.rows_for(num_rows)

    def reserve(self, slot: int, num_rows: int) -> None:
        """Let a slot write its first `num_rows`, for which there is room."""
        is_reserved = self.try_reserve(slot, num_rows)
        assert is_reserved, "there is room"

    def try_reserve(self, slot: int, num_rows: int) -> bool:
        """Let a slot write its first `num_rows`; return False, and change nothing, if the budget has no room."""
        extra = self.lacking(slot, num_rows)
        if extra > self.num_free:
            return False
        self.num_reserved += extra
        self.reserved[slot] += extra
        # Rows that a slot held before may still be in memory; only those beyond take more.
        grown = self.reserved[slot] - self._touched[slot]
        if grown > 0:
            self._touched[slot] += grown
            self.num_touched += grown
            self._return_spare(self.limit - self.num_reserved)
        return True

    def trim(self, slot: int, num_rows: int) -> None:
        """Keep only what the first `num_rows` of a slot need; stages give back whole slots only."""
        if self._memory.can_return or not num_rows:
            self.num_reserved -= self.reserved[slot]
            self.reserved[slot] = min(self.reserved[slot], self._memory.rows_for(num_rows))
            self.num_reserved += self.reserved[slot]
            self._return_spare(self._max_spare)

    def release(self, slot: int) -> None:
        """Reserve nothing of a slot any more."""
        self.trim(slot, 0)

    def check_integrity(self) -> None:
        """Assert the invariant."""
        assert self.num_reserved == sum(self.reserved), "rows leaked"
        assert self.num_touched == sum(self._touched) <= self.limit, "more rows hold memory than may"
        assert all(map(int.__le__, self.reserved, self._touched)), "a slot may write to rows that were given back"

    def _return_spare(self, most: int) -> None:
        """Give free rows back until at most `most` hold memory."""
        # The slots themselves are within the limit, so giving back all spare rows would always be enough.
        for slot, (reserved, touched) in enumerate(zip(self.reserved, self._touched, strict=True)):
            if self.num_touched - self.num_reserved <= most:
                return
            if touched > reserved:
                self._memory.return_rows(slot, reserved)
                self._touched[slot] = reserved
                self.num_touched -= touched - reserved
