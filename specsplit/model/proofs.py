"""Outcomes that depend on machine, libraries and model only, kept in the user's cache so that they are found once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path

from specsplit.model.user_cache import user_cache

_MOST = 256
_RECENT = _MOST // 2
"""Outcomes at the end of the file that stay where they are when they are used."""


def digest(*parts: object) -> str:
    """Return 16 hex digits for parts whose `repr` says all of them."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class Proofs:
    """Outcomes by key in one file of the user's cache; a cache that cannot be used is none."""

    def __init__(self, name: str) -> None:
        folder = user_cache()
        self._file = folder / name if folder is not None else None

    def get(self, key: str) -> str | None:
        """Return the reason that was found against what the key stands for, "" for none, None if nobody tried."""
        known = self._read()
        reason = known.get(key)
        if not isinstance(reason, str):
            return None
        if key not in list(known)[-_RECENT:]:
            self.put(key, reason)  # what is used stays
        return reason

    def put(self, key: str, reason: str) -> None:
        """Keep the outcome; those used longest ago give way.

        A process that writes at the same time may undo this, which is then found again.
        """
        if self._file is None:
            return
        known = self._read()
        known.pop(key, None)
        known[key] = reason
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._file.parent) as folder:
                new = Path(folder) / self._file.name
                new.write_text(json.dumps(dict(list(known.items())[-_MOST:])))
                new.replace(self._file)

    def _read(self) -> dict[str, object]:
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}
