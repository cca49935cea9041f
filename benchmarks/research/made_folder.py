"""Folders of made models: each appears whole, and a record in it says what it was made from. Knows no model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specsplit.core.errors import InvalidRequest

Record = dict[str, Any]


@contextmanager
def beside(folder: Path) -> Generator[Path]:
    """Give a folder next to `folder` to work in, so that `folder` appears only once everything is in it.

    Raises:
        InvalidRequest: it cannot be written.
    """
    scratch: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        yield scratch
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be written ({error.strerror or error}).", param="folder") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def publish(scratch: Path, folder: Path, name: str, record: Mapping[str, object]) -> None:
    """Put a whole folder in its place, with its record in the file `name`, for others to read too."""
    (scratch / name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for each in (scratch, *scratch.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
    scratch.replace(folder)


def read_record(folder: Path, name: str) -> Record:
    """Return the record of a folder, empty if it has none."""
    try:
        record = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def is_made(folder: Path, name: str, wanted: Mapping[str, object]) -> bool:
    """Return whether the record of a folder says what is wanted; a folder with another record is removed."""
    record = read_record(folder, name)
    if record and any(record.get(key) != value for key, value in wanted.items()):
        shutil.rmtree(folder)
        return False
    return bool(record)
