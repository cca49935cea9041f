"""`specsplit` that writes what it has allocated into a file whenever it is sent SIGUSR1; its first argument names it.

Run as a module, in a process of its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType


class _Mallinfo(ctypes.Structure):
    """The struct mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    )
    uordblks: int
    hblkhd: int


def allocated_bytes() -> int:
    """Return the bytes that malloc has given out, mapped ones too, without those that Python has for small objects."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def main(place: Path, arguments: list[str]) -> int:
    """Run the command line."""
    from specsplit.cli.main import main as run

    def write(number: int, frame: FrameType | None) -> None:
        gc.collect()
        counts = {"malloc": allocated_bytes(), "blocks": sys.getallocatedblocks(), "objects": len(gc.get_objects())}
        whole = place.with_suffix(".new")
        whole.write_text(json.dumps(counts), encoding="utf-8")
        whole.replace(place)

    signal.signal(signal.SIGUSR1, write)
    return run(arguments)


if __name__ == "__main__":
    # As process of a test it leaves nothing behind to be finalised.
    code = main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)
