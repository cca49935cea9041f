"""Sizes of memory as users write them: bytes with a unit, or a fraction of what is free. Knows no machine."""

from __future__ import annotations

import re

from specsplit.core.errors import InvalidSettings

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([KMGT])iB", re.IGNORECASE)
_FRACTION = re.compile(r"0?\.[0-9]{1,6}|1(?:\.0{1,6})?")

MemorySize = int | float
"""Bytes as an int, or as a float a fraction of the free memory."""


def parse_memory(text: str | None, name: str = "--kv-memory") -> MemorySize | None:
    """Return the size that `text` names, such as 8GiB, 512MiB or 0.85; None for None.

    `name` is what the user calls the setting.

    Raises:
        InvalidSettings: it names none.
    """
    if text is None:
        return None
    text = text.strip()
    if (found := _SIZE.fullmatch(text)) is not None:
        num_bytes = int(float(found[1]) * _UNITS[found[2].upper()])
        if num_bytes:
            return num_bytes
    elif _FRACTION.fullmatch(text) and float(text) > 0:
        return float(text)
    raise InvalidSettings(
        f"{name} must be a size such as 8GiB or 512MiB, or a fraction of the free memory such as 0.85, "
        f"not {text or 'empty'}."
    )


def shown_memory(num_bytes: int) -> str:
    """Return so many bytes as a user reads them."""
    for unit in ("T", "G", "M", "K"):
        if num_bytes >= _UNITS[unit]:
            return f"{num_bytes / _UNITS[unit]:.1f} {unit}iB"
    return f"{num_bytes} bytes"
