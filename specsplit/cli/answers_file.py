"""The file of answers to many prompts: one JSON line each, appended whole by one command. Knows no prompts."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self, cast

from specsplit.core.errors import InvalidRequest, ResourceError
from specsplit.core.paths import expanded

LineId = str | int
_NAMELESS = {"id", "line", "error"}
"""Fields of the error of a prompt's line that is so broken that it has no id."""

_OUTCOMES = {"text", "error"}
"""Fields of which every answer has one."""
_BEGINNING = b'{"id": '
"""How every line begins."""


def id_of(entry: Mapping[str, Any], *, default: int | None = None) -> LineId | None:
    """Return the id of a line; None if it has none, or one that is neither a text nor a whole number."""
    found = entry.get("id", default)
    return found if isinstance(found, str | int) and not isinstance(found, bool) else None


class AnswersFile:
    """Answers are appended to it; it was begun by an earlier command or by this one."""

    def __init__(self, path: Path, file: FileIO, done_ids: Collection[LineId]) -> None:
        self.path = path
        self.done_ids = frozenset(done_ids)
        """The ids that have an answer already."""
        self._file = file

    @classmethod
    def open(cls, path: Path, *, retried: Collection[LineId]) -> Self:
        """Open the file for more answers; errors of ids to be `retried` or of none, and a half line, are dropped.

        Raises:
            InvalidRequest: it cannot be read or written, another command writes to it, or it holds something else than
                answers.
        """
        path = expanded(path).resolve()
        try:
            with ExitStack() as opened:
                file = opened.enter_context(_locked(path))
                data = path.read_bytes() if path.is_file() else b""
                kept, done_ids = _kept_lines(data, path, retried)
                if kept == data:
                    opened.pop_all()
                else:
                    file = _replaced(path, kept)
                return cls(path, file, done_ids)
        except BlockingIOError as error:
            raise InvalidRequest(
                f"Another command writes to {path}; wait for its end, or name another file with --output.", "output"
            ) from error
        except OSError as error:
            raise InvalidRequest(
                f"The output file {path} cannot be written ({error.strerror}); check --output.", param="output"
            ) from error

    def write(self, answer: Mapping[str, Any]) -> None:
        """Append an answer.

        Raises:
            ResourceError: the disk is full, or the file cannot be written any more.
        """
        line = memoryview(f"{json.dumps(answer)}\n".encode())
        try:
            while line:
                line = line[os.write(self._file.fileno(), line) :]
        except OSError as error:
            raise ResourceError(
                f"The output file {self.path} cannot be written any more ({error.strerror})."
            ) from error

    def close(self) -> None:
        self._file.close()


def _locked(path: Path) -> FileIO:
    """Open a file to append to; one that can hold answers is locked until it is closed.

    Raises:
        BlockingIOError: another command has locked it, or has just replaced it.
    """
    # Without a buffer: a line is in the file when it has been written.
    file = FileIO(path, "ab")
    try:
        if path.is_file():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError
    except OSError:
        file.close()
        raise
    return file


def _replaced(path: Path, kept: bytes) -> FileIO:
    """Write a file anew, and return the new one, locked; whoever calls this holds the lock of the old one."""
    beside = path.with_name(f"{path.name}.new")
    # Nobody reads it beside who may not read the file itself.
    beside.touch(0o600)
    shutil.copymode(path, beside)
    with suppress(PermissionError):
        shutil.chown(beside, path.stat().st_uid, path.stat().st_gid)
    beside.write_bytes(kept)
    file = _locked(beside)
    # Replaced at once, so that no moment has fewer answers than before.
    beside.replace(path)
    return file


def _kept_lines(data: bytes, path: Path, retried: Collection[LineId]) -> tuple[bytes, set[LineId]]:
    """Return the lines to be kept and the ids that they answer."""
    lines = data.split(b"\n")
    kept: list[bytes] = []
    done_ids: set[LineId] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _entry(line)
        if entry is not None and entry.keys() == _NAMELESS and entry["id"] is None:
            continue  # the prompt's line, if it is still broken, is told again
        found = id_of(entry) if entry is not None and not _OUTCOMES.isdisjoint(entry) else None
        if entry is None or found is None:
            is_cut = entry is None and number == len(lines) and _BEGINNING.startswith(line[: len(_BEGINNING)])
            if is_cut:
                continue  # the command that wrote it was killed in the middle of the line
            raise InvalidRequest(f"Line {number} of {path} is no answer; name another file with --output.", "output")
        if "error" in entry and found in retried:
            continue
        kept.append(line + b"\n")
        if "error" not in entry:
            done_ids.add(found)
    return b"".join(kept), done_ids


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", entry) if isinstance(entry, dict) else None
