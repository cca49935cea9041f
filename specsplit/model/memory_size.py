"""Sizes of memory as users write them: bytes with a unit, or a fraction of what is free. Knows no machine."""

from __future__ import annotations

import re

from specsplit.core.errors import InvalidSettings

_UNITS = "KMGT"
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([KMGT])(iB?|B)", re.IGNORECASE)
_FRACTION = re.compile(r"0?\.[0-9]{1,6}|1(?:\.0{1,6})?")

MemorySize = int | float
"""Bytes as an int, or as a float a fraction of the free memory."""


def parse_memory(text: str | None, name: str = "kv_memory") -> MemorySize | None:
    """Return the size that `text` names, such as 8GiB or 8Gi (binary), 8GB (decimal) or 0.85; None for None.

    `name` is what the user calls the setting.

    Raises:
        InvalidSettings: it names none.
    """
    if text is None:
        return None
    text = text.strip()
    if _FRACTION.fullmatch(text) and float(text) > 0:
        return float(text)
    return _num_bytes(text, f"{name} must be a size such as 8GiB or 8GB, or a fraction of the free memory such as 0.85")


def parse_size(text: str, name: str) -> int:
    """Return the bytes that `text` names, such as 24GiB or 24Gi (binary) or 24GB (decimal).

    `name` is what the user calls the setting.

    Raises:
        InvalidSettings: it names none.
    """
    return _num_bytes(text.strip(), f"{name} must be a size such as 24GiB or 24GB")


def _num_bytes(text: str, rule: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is not None:
        base = 1000 if found[3].upper() == "B" else 1024  # Kubernetes leaves out the B of GiB
        num_bytes = int(float(found[1]) * base ** (_UNITS.index(found[2].upper()) + 1))
        if num_bytes:
            return num_bytes
    raise InvalidSettings(f"{rule}, not {text or 'empty'}.")


def shown_memory(num_bytes: int) -> str:
    """Return so many bytes as a user reads them."""
    for power in range(len(_UNITS), 0, -1):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {_UNITS[power - 1]}iB"
    return f"{num_bytes} bytes"
