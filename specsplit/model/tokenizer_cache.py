"""The tokenizers that workers sent, in folders named by the hash of their files; the oldest give way to new ones.

Knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from specsplit.core.errors import ModelDamaged, ResourceError
from specsplit.core.types import TokenizerFiles
from specsplit.limits import MAX_TOKENIZER_BYTES, MAX_TOKENIZER_CACHE_BYTES
from specsplit.model.identity import files_hash, place_of, read_tokenizer_files

_IN_USE_S = 60.0
"""Tokenizers that were used so recently stay, since another process may be reading them."""


def held_tokenizer_hash(folder: Path) -> str:
    """Return the hash of the tokenizer files that `tokenizer_from_files` left in `folder`, empty if there are none."""
    try:
        files = read_tokenizer_files(folder, str(folder)) if folder.is_dir() else {}
    except (ModelDamaged, OSError):
        return ""
    return files_hash(files) if files else ""


def store_tokenizer(files: TokenizerFiles, folder: Path) -> None:
    """Have the files that a worker sent in `folder`, a folder of its own, and count it as used now.

    Without files, those that an earlier call left there have to be the right ones.

    Raises:
        ModelDamaged: a name that leads elsewhere, or other files than `files.hash` says.
        ResourceError: the folder cannot be written.
    """
    if files.files:
        _check_sent(files)
    if held_tokenizer_hash(folder) != files.hash:
        if not files.files:
            raise ModelDamaged(f"{folder} does not hold the tokenizer files of hash {files.hash}.")
        try:
            _write(files, folder)
        except OSError as error:
            raise ResourceError(f"The tokenizer's files cannot be written to {folder} ({error.strerror}).") from error
    with contextlib.suppress(OSError):
        os.utime(folder)


def shrink_cache(cache: Path, max_bytes: int = MAX_TOKENIZER_CACHE_BYTES) -> None:
    """Remove the tokenizers whose last use is longest ago, until the others fit into `max_bytes`."""
    folders: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):  # another process may be at it, too
        for folder in cache.iterdir():
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            folders.append((folder.stat().st_mtime, size, folder))
    left = sum(size for _, size, _ in folders)
    for used_s, size, folder in sorted(folders):
        if left <= max_bytes or used_s > time.time() - _IN_USE_S:
            return
        shutil.rmtree(folder, ignore_errors=True)
        left -= size


def _check_sent(files: TokenizerFiles) -> None:
    for name in files.files:
        place_of(name)
    if sum(map(len, files.files.values())) > MAX_TOKENIZER_BYTES:
        raise ModelDamaged(f"The tokenizer that the target sent exceeds {MAX_TOKENIZER_BYTES >> 20} MiB.")
    if files_hash(files.files) != files.hash:
        raise ModelDamaged("The tokenizer that the target sent is not the one that its hash names; ask again.")


def _write(files: TokenizerFiles, folder: Path) -> None:
    """Put all files in place at once, so that no process ever sees half of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        for name, content in files.files.items():
            path = new / place_of(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)  # it holds another tokenizer, or nothing
        # Two processes may come here at once: the loser's rename fails, and the winner's files are the same.
        try:
            new.rename(folder)
        except OSError:
            if held_tokenizer_hash(folder) != files.hash:
                raise
