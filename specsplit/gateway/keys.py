"""API keys: a file of names and hashes, never of the keys themselves."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from specsplit.core.errors import InvalidSettings
from specsplit.core.paths import expanded
from specsplit.core.sections import GatewaySettings
from specsplit.rpc.transport import is_loopback, parse_address

LOOK_S = 1.0
"""Period at which requests look whether the file has changed."""
_LINE = re.compile(r"([A-Za-z0-9_.-]{1,64}):([0-9a-f]{64})")
_log = logging.getLogger(__name__)


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

    def __len__(self) -> int:
        return len(self._names)

    def caller(self, authorization: str) -> str | None:
        """Return the name of the key in an Authorization header, None if it is not let in."""
        scheme, _, key = authorization.partition(" ")
        # Looked up by its hash, whose comparison tells nothing about the key.
        return self._names.get(_hash(key.strip())) if scheme.lower() == "bearer" else None


class KeyFile(KeyRing):
    """The keys of a file, followed through its changes; used by one thread."""

    def __init__(self, path: Path) -> None:
        """Read a file with a line `name:sha256` for each key; it may have empty lines and comments that begin with #.

        Raises:
            InvalidSettings: it cannot be read, or a line is malformed.
        """
        self._path = path
        self._stamp = _stamp(path)
        """The stamp of the content in use."""
        self._changed: _Stamp | str | None = None
        """The stamp of the last change that was seen."""
        self._failure: tuple[object, str] | None = None
        """Stamp and error of the content that could last not be used, which are logged once."""
        super().__init__(_names_in(path))
        self._looked_s = time.monotonic()

    def caller(self, authorization: str) -> str | None:
        """Return the name of the key in an Authorization header, None if the file does not let it in now."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._look()
        return super().caller(authorization)

    def warn_if_empty(self) -> None:
        """Log a warning if nobody is let in."""
        if not self._names:
            _log.warning(
                "%s has no key, so every request is refused with status 401; add the line of specsplit keys new NAME",
                self._path,
            )

    def _look(self) -> None:
        """Read the file if it has changed; what cannot be used changes nothing, and is tried again."""
        self._looked_s = time.monotonic()
        # The stamp is taken first: a change while the file is read shows at the next look.
        stamp = _stamp(self._path)
        if stamp is None or stamp == self._stamp:
            self._failure = None
            return
        before, self._changed = self._changed, stamp
        if before != stamp and _is_being_written(stamp, self._stamp):
            return
        try:
            self._names = _names_in(self._path)
        except InvalidSettings as error:
            if (stamp, str(error)) != self._failure:
                _log.warning("the API keys before stay in use: %s", error)
            self._failure = stamp, str(error)
            return
        self._stamp, self._failure = stamp, None
        _log.info("the API keys in %s have changed; %d are let in", self._path, len(self))
        self.warn_if_empty()


class _Stamp(NamedTuple):
    """Facts of a file that change with its content."""

    written_s: float
    inode: int
    size: int


def _stamp(path: Path) -> _Stamp | str | None:
    """Return a value that changes with a file; None for a pipe, which has its content only once."""
    try:
        found = expanded(path).stat()
    except OSError as error:
        return str(error)
    return _Stamp(found.st_mtime, found.st_ino, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _is_being_written(now: object, before: object) -> bool:
    """Return whether a file may be half written: it is the one that it was, and was changed a moment ago."""
    if not isinstance(now, _Stamp) or not isinstance(before, _Stamp):
        return False
    return now.inode == before.inode and time.time() - now.written_s < LOOK_S


def _names_in(path: Path) -> dict[str, str]:
    """Return the names in a file by the hash of their key; raises InvalidSettings."""
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
    return names


def required_keys(settings: GatewaySettings) -> KeyFile | None:
    """Return the keys that a gateway lets in, None if nobody needs one.

    Raises:
        InvalidSettings: other machines could use the gateway without a key, and nobody said that they may; or the file
            of keys cannot be used.
    """
    if settings.api_key_file is not None:
        return KeyFile(Path(settings.api_key_file))
    for option, listen in {"http": settings.http, "lmtp": settings.lmtp}.items():
        is_open = listen is not None and not is_loopback(parse_address(listen, listening=True)[0])
        if is_open and not settings.allow_anonymous:
            raise InvalidSettings(
                f"--{option} {listen} can be reached from other machines: name the keys that are let in with "
                "--api-key-file (specsplit keys new makes one), or let in everybody with --allow-anonymous."
            )
    return None


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()
