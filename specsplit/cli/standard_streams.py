"""The standard streams of a process, as far as they are closed or cannot be written."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open /dev/null in the place of each standard stream that is closed; `sys.__stdin__` and the like stay None.

    Otherwise the next file or socket gets its number, and is taken for the stream; uvloop aborts when it closes one.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free, which is this one: those below are open.
            os.open(os.devnull, os.O_RDWR)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def is_stdout_broken() -> bool:
    """Return whether nothing can be written to stdout any more, not even a new line; what it holds is dropped then."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        drop_stdout()
        return True
    return False


def drop_stdout() -> None:
    """Drop what stdout holds and gets; the interpreter flushes it once more at exit, and would report its error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
