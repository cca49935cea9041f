"""The coordinator's record of the rows that all stages hold: token ids and prefix hashes, slot by slot.

It stands where a KV cache stands in one process: rows are written by a forward and moved together afterwards. Moving is
only noted here; it reaches the stages as the keep-list of the next packet.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from specsplit.core.record import record
from specsplit.model.attention.paths import slot_rows
from specsplit.stages.memory import ChainMemory
from specsplit.stages.packet import KeepList

_HASH_BYTES = 8


class RowHash:
    """Prefix hashes under a key of this coordinator's own, so that stages cannot guess tokens from them."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def after(self, before: int, token_id: int) -> int:
        """Return the hash of a prefix that ends with `token_id`; `before` is that of the prefix without it."""
        data = before.to_bytes(_HASH_BYTES, "little") + token_id.to_bytes(4, "little")
        return int.from_bytes(hashlib.blake2b(data, digest_size=_HASH_BYTES, key=self._key).digest(), "little")


@record
class LastRows:
    """Rows that the stages hold as the last packet wrote them, before its keep-list has moved any.

    Row `start + i` of the coordinator is row `sources[i]` of the packet `request_id`, whose first row is `start`.
    """

    request_id: int
    start: int
    sources: tuple[int, ...]

    def keep(self, length: int) -> KeepList | None:
        """Return the keep-list that leaves a slot of `length` rows; None if it takes none to roll back there."""
        return KeepList(self.request_id, self.sources[: length - self.start]) if length >= self.start else None


class RemoteSlot:
    """One slot's rows, as the stages will hold them once the next packet's keep-list has been applied."""

    def __init__(self, row_hash: RowHash) -> None:
        self._row_hash = row_hash
        self.epoch = 0
        self.ids: list[int] = []
        self.hashes: list[int] = []
        self.last: LastRows | None = None
        self._ended_epoch = 0

    def end(self) -> int | None:
        """Forget all rows; return the epoch that is over, None where no step has begun since the last end."""
        self.ids, self.hashes, self.last = [], [], None
        if self.epoch == self._ended_epoch:
            return None
        self._ended_epoch = self.epoch
        return self.epoch

    def begin(self, base_length: int) -> None:
        """Go on behind the first `base_length` rows; below the last packet's, that is a new epoch.

        What is still under way of the old epoch is then refused wherever it arrives.
        """
        assert base_length <= len(self.ids), "a step builds on rows that were never computed"
        # A keep-list can only choose among the last packet's rows. A rollback below them has to be announced by a new
        # epoch, so that no late packet of the old one writes behind it.
        if self.last is None or base_length < self.last.start or base_length == 0:
            self.epoch, self.last = self.epoch + 1, None

    def base_hash(self, length: int) -> int:
        return self.hashes[length - 1] if length else 0

    def hashes_of(self, base_length: int, token_ids: Sequence[int], parents: Sequence[int] | None) -> list[int]:
        """Return the prefix hash of each row behind `base_length`; `parents` are theirs, None for a chain."""
        base, hashes = self.base_hash(base_length), list[int]()
        for row, token_id in enumerate(token_ids):
            parent = row - 1 if parents is None else parents[row]
            hashes.append(self._row_hash.after(hashes[parent] if parent >= 0 else base, token_id))
        return hashes

    def write(self, base_length: int, token_ids: Sequence[int], hashes: Sequence[int], last: LastRows) -> None:
        """Record rows that every stage has computed."""
        self.ids[base_length:], self.hashes[base_length:], self.last = token_ids, hashes, last

    def move_rows(self, sources: Sequence[int], start: int) -> None:
        """Record that rows `sources` (ascending) of the last packet become rows start, start + 1, and so on."""
        if not sources:
            return
        last = self.last
        assert last is not None, "rows are moved after the forward that wrote them"
        assert start >= last.start, "only rows of the last packet are moved"
        # Ascending sources never lie before their targets, so moving in place overwrites nothing that is still needed.
        moved = list(last.sources)
        for target, source in enumerate(sources, start):
            self.ids[target], self.hashes[target] = self.ids[source], self.hashes[source]
            moved[target - last.start] = moved[source - last.start]
        self.last = LastRows(last.request_id, last.start, tuple(moved))


class RemoteKV:
    """All slots of a chain; in the place of a KVCache, whose rows it counts as every stage holds them."""

    can_copy = can_fill = False
    """No packet tells stages to copy rows, or to write any without a forward; a slot may be taken over as it is."""
    can_return = False
    """Stages give a slot's rows back when its session ends, or its next one begins; nobody can ask for a part."""

    def __init__(self, num_slots: int, capacity: int, memory: ChainMemory | None = None) -> None:
        """Count the rows of slots of `capacity` rows, of which `memory` says how many may be used; None is all."""
        row_hash = RowHash()
        self.slots = [RemoteSlot(row_hash) for _ in range(num_slots)]
        self.num_slots, self.capacity = num_slots, capacity
        self.row_limit = memory.num_rows if memory is not None else num_slots * capacity
        self.row_bytes = memory.row_bytes if memory is not None else 0

    def fill_rows(self, slot: int, count: int) -> None:
        """Do nothing: nobody may ask for it (`can_fill`)."""

    def clear_rows(self, slot: int, start: int) -> None:
        """Do nothing: the stages clear the rows of a slot that is taken over by themselves."""

    def rows_for(self, num_rows: int) -> int:
        """Return the rows that hold memory in a stage if the first `num_rows` of a slot are written."""
        return min(slot_rows(num_rows), self.capacity) if num_rows else 0

    def return_rows(self, slot: int, start: int) -> None:
        """Do nothing: stages hear of the end of a slot's session or see its next one, and give its rows back."""

    def move_rows(self, slot: int, sources: Sequence[int], start: int) -> None:
        """Record what a KVCache would do at once."""
        self.slots[slot].move_rows(sources, start)
