"""API keys: a file of names and hashes, never of the keys themselves."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from specsplit.core.errors import InvalidSettings
from specsplit.core.paths import expanded

_LINE = re.compile(r"([A-Za-z0-9_.-]{1,64}):([0-9a-f]{64})")


def new_key(name: str) -> tuple[str, str]:
    """Return a new key, and the line for the file of keys that lets it in as `name`.

    Raises:
        InvalidSettings: a name that cannot stand in the file.
    """
    key = f"sk-specsplit-{secrets.token_urlsafe(32)}"
    line = f"{name}:{_hash(key)}"
    if not _LINE.fullmatch(line):
        raise InvalidSettings("A key's name has 1 to 64 letters, digits, dots, dashes or underscores.")
    return key, line


class KeyRing:
    """The keys that are let in."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        """Names by the hash of their key."""

    @classmethod
    def from_file(cls, path: Path) -> KeyRing:
        """Read a file with a line `name:sha256` a key; empty lines and those that begin with # say nothing.

        Raises:
            InvalidSettings: it cannot be read, or a line is malformed.
        """
        try:
            lines = expanded(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSettings(f"The file of keys {path} cannot be read; check --api-key-file.") from error
        names: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = _LINE.fullmatch(text)
            if match is None:
                # The line itself is not shown: somebody may have written a key there.
                raise InvalidSettings(f"Line {number} of {path} is not name:sha256; make one with specsplit keys new.")
            names[match[2]] = match[1]
        return cls(names)

    def __len__(self) -> int:
        return len(self._names)

    def caller(self, authorization: str) -> str | None:
        """Return the name of the key in an Authorization header, None if it is not let in."""
        scheme, _, key = authorization.partition(" ")
        # Looked up by its hash, whose comparison tells nothing about the key.
        return self._names.get(_hash(key.strip())) if scheme.lower() == "bearer" else None


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()
