"""The standard streams of a process that was started without some of them."""

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
