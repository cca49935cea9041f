"""Weights that are mapped from their file: the pages that are not read any more leave this process's memory."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_MADV_DONTNEED = 4
_Range = tuple[int, int]


class MappedFiles:
    """The files that are mapped in this process now; those that are mapped later are not among them."""

    def __init__(self) -> None:
        self._mapped = _file_mappings()
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise if self._mapped else None
        if self._madvise is not None:
            self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def let_pages_go(self, ranges: Iterable[_Range]) -> None:
        """Drop the pages of these addresses [start, stop) that are mapped from a file; what is read again is read anew.

        Memory that is not a file's stays as it is. The files have to be mapped still. For weights only, which nobody
        writes: a page that was written is lost.
        """
        if self._madvise is None:
            return
        for first, last in ranges:
            # Whole pages only: the first and the last one may hold a neighbour's numbers.
            start, stop = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
            place = bisect.bisect_right(self._mapped, (start, 1 << 64)) - 1
            if start < stop and place >= 0 and stop <= self._mapped[place][1]:
                self._madvise(start, stop - start, _MADV_DONTNEED)


def addresses(tensor: Tensor) -> _Range:
    """Return where a contiguous tensor lies."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def _file_mappings() -> list[_Range]:
    """Return the addresses at which files are mapped here, ascending; none where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    # Address, permissions, offset, device, inode, path; memory that is no file's has inode 0.
    fields = [line.split(maxsplit=5) for line in lines]
    spans = [field[0].split("-") for field in fields if field[4] != "0"]
    return sorted((int(start, 16), int(stop, 16)) for start, stop in spans)
