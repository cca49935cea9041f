"""A tensor of zeros in reserved addresses: on a CPU a page takes memory once it is written to, until it is given back.

Legend: the tensor is [L, slots, H, S, D]; a slot's rows lie apart, S of them for each layer and head.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python 3.11 does not name: the system promises no memory for pages that are never touched."""


class AddressSpace:
    """The tensor, and the way back of its rows; without such memory it is a plain allocation, which gives none back."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._item_bytes = shape, dtype.itemsize
        self._memory: mmap.mmap | None = None
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or sys.platform != "linux" or not num_bytes:
            self.tensor: Tensor = torch.zeros(shape, dtype=dtype, device=device)
            return
        # Without MAP_NORESERVE Linux refuses a mapping that is larger than the machine's memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = memory = mmap.mmap(-1, num_bytes, flags=flags)
        # A huge page would span the rows of several heads, and all of them take memory once one is written to.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(memory, dtype=dtype).view(shape)

    @property
    def can_return(self) -> bool:
        return self._memory is not None

    def give_back(self, slot: int, start: int) -> None:
        """Give the pages of a slot's rows from `start` on back to the system; they read as zeros from then on."""
        if self._memory is None:
            return
        num_layers, num_slots, num_heads, num_rows, size = self._shape
        row_bytes = size * self._item_bytes
        head_bytes = num_rows * row_bytes
        # From row 0 on the heads of a layer are one stretch.
        stretches, length = (1, num_heads * head_bytes) if start == 0 else (num_heads, head_bytes)
        for layer in range(num_layers):
            first = (layer * num_slots + slot) * num_heads * head_bytes
            for stretch in range(stretches):
                begin = first + stretch * length
                # Pages that reach into other rows stay: [row .. | page, page, ... | .. row of another head or slot).
                inner = -(-(begin + start * row_bytes) // _PAGE) * _PAGE
                end = (begin + length) // _PAGE * _PAGE
                if inner < end:
                    self._memory.madvise(mmap.MADV_DONTNEED, inner, end - inner)
