"""Static KV slots: addresses that never change, and the pool that hands them out.

    rows of a slot:  [ committed tokens | tree of the last step | free )       borders: 0, length, ..., S

Rollback sets `length` and clears nothing. A slot is address space: on a CPU a row takes memory once it is written
to, until it is given back. Legend: L layers, S slot capacity, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from specsplit.core.errors import NoFreeSlot
from specsplit.model.address_space import AddressSpace
from specsplit.model.attention.paths import slot_rows
from specsplit.model.head_shape import HeadShape

_FEW_ROWS = 8
"""numpy moves up to so many rows faster one by one than by a list of indices."""


class KVCache:
    """Keys and values of every layer and slot; equal shapes share one block, so that moving rows is one operation."""

    can_copy = can_fill = True

    def __init__(
        self,
        shapes: Sequence[tuple[HeadShape, HeadShape]],
        num_slots: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        row_limit: int | None = None,
    ) -> None:
        """Reserve the slots; of all their rows `row_limit` may hold memory at a time, by default all."""
        self.num_slots, self.capacity = num_slots, capacity
        self.row_bytes = self.bytes_per_token(shapes, dtype)
        self.row_limit = num_slots * capacity if row_limit is None else row_limit
        flat = [shape for pair in shapes for shape in pair]
        spaces = {
            shape: AddressSpace(
                (flat.count(shape), num_slots, shape.num_heads, capacity, shape.head_dim), dtype, device
            )
            for shape in dict.fromkeys(flat)
        }
        self._spaces = list(spaces.values())
        self._blocks = {shape: space.tensor for shape, space in spaces.items()}
        # The same memory as numpy has it, which knows no bf16.
        views = (block.view(torch.int16) if dtype.itemsize == 2 else block for block in self._blocks.values())
        self._arrays = [view.numpy() for view in views] if device.type == "cpu" else []
        cursor = dict.fromkeys(self._blocks, 0)

        def take(shape: HeadShape) -> Tensor:
            cursor[shape] += 1
            return self._blocks[shape][cursor[shape] - 1]

        pairs = [(take(key), take(value)) for key, value in shapes]
        self.keys = [key for key, _ in pairs]
        """Per layer: [slots, H, S, D]."""
        self.values = [value for _, value in pairs]

    @property
    def num_bytes(self) -> int:
        return sum(block.numel() * block.element_size() for block in self._blocks.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of a CPU's memory that rows may still take, as if none was written; a GPU's are taken at once."""
        is_lazy = all(block.device.type == "cpu" for block in self._blocks.values())
        return self.row_limit * self.row_bytes if is_lazy else 0

    @property
    def can_return(self) -> bool:
        """Whether rows can be given back."""
        return all(space.can_return for space in self._spaces)

    def rows_for(self, num_rows: int) -> int:
        """Return the rows that hold memory if the first `num_rows` are written: a forward clears some behind them."""
        return min(slot_rows(num_rows), self.capacity) if num_rows else 0

    def return_rows(self, slot: int, start: int) -> None:
        """Give the rows of a slot from `start` on back to the system; they read as zeros from then on."""
        for space in self._spaces:
            space.give_back(slot, start)

    @staticmethod
    def bytes_per_token(shapes: Sequence[tuple[HeadShape, HeadShape]], dtype: torch.dtype) -> int:
        """Return the bytes that one token of one session occupies over all layers."""
        return dtype.itemsize * sum(s.num_heads * s.head_dim for pair in shapes for s in pair)

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of a slot to another one."""
        for block in self._blocks.values():
            block[:, target, :, :count] = block[:, source, :, :count]
        self.clear_rows(target, count)

    def fill_rows(self, slot: int, count: int) -> None:
        """Write zeros to the first `count` rows of a slot, so that they hold memory as a text's do."""
        for block in self._blocks.values():
            block[:, slot, :, :count] = 0

    def clear_rows(self, slot: int, start: int) -> None:
        """Clear the rows of a slot from `start` on that are in sight of the row before, whatever session left them.

        The next token attends to them without clearing them. They are hidden, but one that is infinite would count.
        """
        for block in self._blocks.values():
            block[:, slot, :, start : slot_rows(start)] = 0

    def move_rows(self, slot: int, sources: Sequence[int], start: int) -> None:
        """Copy rows `sources` (ascending) of a slot to rows start, start + 1, ... of it."""
        # Rows that are in place already: of a chain that is accepted from its start on, all of them.
        while sources and sources[0] == start:
            sources, start = sources[1:], start + 1
        if not sources:
            return
        end = start + len(sources)
        are_few = len(sources) <= _FEW_ROWS and start < sources[0]
        # Row start + i lies in front of sources[i], and sources ascend, so none is overwritten before it is read.
        for array in self._arrays:  # numpy moves a few rows in a fraction of torch's time, one by one most of all
            rows = array[:, slot]
            if are_few:
                for row, source in enumerate(sources, start):
                    rows[:, :, row] = rows[:, :, source]
            else:
                rows[:, :, start:end] = rows[:, :, sources]
        if not self._arrays:
            for block in self._blocks.values():
                rows = block[:, slot]
                rows[:, :, start:end] = rows[:, :, sources]


class Slot:
    """One session's region of the cache; the only owner of its length."""

    __slots__ = ("index", "length")

    def __init__(self, index: int) -> None:
        self.index, self.length = index, 0


class SlotPool:
    """Hands out slots; never grows."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = [Slot(index) for index in reversed(range(num_slots))]
        self._used: dict[int, Slot] = {}

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def used_indices(self) -> Collection[int]:
        return self._used.keys()

    def acquire(self) -> Slot:
        """Take a free slot at length 0.

        Raises:
            NoFreeSlot: every slot is in use.
        """
        if not self._free:
            raise NoFreeSlot(f"All {self._num_slots} sessions of this worker are in use; try again when one has ended.")
        slot = self._free.pop()
        slot.length = 0
        self._used[slot.index] = slot
        return slot

    def release(self, slot: Slot) -> None:
        self._free.append(self._used.pop(slot.index))

    def check_integrity(self) -> None:
        """Assert that free and used slots together are all slots, each once."""
        indices = sorted([slot.index for slot in self._free] + list(self._used))
        assert indices == list(range(self._num_slots)), f"slots leaked or doubled: {indices}"
