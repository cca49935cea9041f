"""Tells two models apart without loading them, by hashes over their files.

Also reads a tokenizer's files for a process that lacks the model. Knows neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict, cast

from specsplit.core.errors import ModelDamaged
from specsplit.limits import MAX_TOKENIZER_BYTES

_TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
    "chat_template.json",
    "chat_template.jinja",
)
_TEMPLATE_FOLDER = "additional_chat_templates"
_TEMPLATE_PREFIX = "additional_chat_template."
"""File names travel without folders: `additional_chat_templates/rag.jinja` as `additional_chat_template.rag.jinja`."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_HASH_DIGITS = 16
_SAMPLE_BYTES = 32
_NUM_SAMPLES = 4
"""Samples of each weight tensor, its first and its last bytes among them."""
_MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors format itself."""
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)
"""The exceptions that reading the header of a damaged file raises."""


Stamps = Sequence[tuple[str, int, int, int, int, int]]


class _TensorEntry(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_tokenizer_files(folder: Path, name: str) -> dict[str, bytes]:
    """Return the files in `folder` that a tokenizer is made from, by name.

    Raises:
        ModelDamaged: they are too large, cannot be read, or a link leads out of the model `name`.
    """
    files, room = dict[str, bytes](), MAX_TOKENIZER_BYTES
    try:
        for path in _tokenizer_paths_within(folder, name):
            # One byte more than allowed shows a file that is too large without reading all of it.
            with path.open("rb") as file:
                content = file.read(room + 1)
            room -= len(content)
            if room < 0:
                raise ModelDamaged(f"The tokenizer files of {name} exceed {MAX_TOKENIZER_BYTES >> 20} MiB.")
            files[path.name if path.parent == folder else _TEMPLATE_PREFIX + path.name] = content
    except OSError as error:
        raise ModelDamaged(f"The tokenizer files of {name} cannot be read ({error}).") from error
    return files


def require_no_links_out(folder: Path | None, name: str) -> None:
    """Refuse a folder whose tokenizer's files `read_tokenizer_files` refuses for being links, without reading them.

    Raises:
        ModelDamaged: a link leads out of the model `name`.
    """
    if folder is not None:
        with suppress(OSError):  # which reading says in better words
            _tokenizer_paths_within(folder, name)


def place_of(file_name: str) -> Path:
    """Return the place below the tokenizer's folder of a file of that name.

    Raises:
        ModelDamaged: the name could lead elsewhere.
    """
    if not file_name or file_name.startswith(".") or any(character in file_name for character in "/\\:\0"):
        raise ModelDamaged(f"A tokenizer file cannot be called {file_name!r}.")
    if file_name.startswith(_TEMPLATE_PREFIX):
        return Path(_TEMPLATE_FOLDER) / place_of(file_name.removeprefix(_TEMPLATE_PREFIX))
    return Path(file_name)


def files_hash(files: Mapping[str, bytes]) -> str:
    """Return the hash over names and contents, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{len(name.encode())} {len(content)} {name}".encode())
        digest.update(content)
    return digest.hexdigest()[:_HASH_DIGITS]


def weights_hash(folder: Path) -> str:
    """Return a hash over names, types, shapes and samples of all weight tensors, 16 hexadecimal digits.

    It does not depend on how tensors are spread over files. It reads the files' headers and a few bytes at fixed places
    of each tensor: models of hundreds of gigabytes take milliseconds.

    Raises:
        OSError: a file cannot be read; ModelDamaged: their index is damaged.
    """
    digest = hashlib.sha256()
    for part in sorted(part for path in _weight_paths(folder) for part in _tensor_samples(path)):
        digest.update(part)
    return digest.hexdigest()[:_HASH_DIGITS]


def has_weights(folder: Path, name: str) -> bool:
    """Return whether all weight files of the model `name` are in its folder: a stage fetches only its own ones.

    Raises:
        OSError: the index of the files cannot be read; ModelDamaged: it is damaged.
    """
    paths = _weight_paths(folder, name)
    return bool(paths) and all(path.is_file() for path in paths)


def read_index(content: bytes, name: str) -> dict[str, str]:
    """Return the file of each tensor by the index of a model's weight files.

    Raises:
        ModelDamaged: it is no such index, or leads out of the model's folder.
    """
    try:
        index: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"The {INDEX_FILE} of {name} cannot be read ({error}).") from error
    files: Any = cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelDamaged(f"The {INDEX_FILE} of {name} has no weight_map from tensors to files.")
    weight_map = cast("dict[str, str]", files)
    # An index comes from the network: a path out of the folder must not be opened.
    for file in set(weight_map.values()):
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\0" in file:
            raise ModelDamaged(f"The {INDEX_FILE} of {name} leads out of the model's folder ({file!r}).")
    return weight_map


def weight_stamps(folder: Path | None) -> Stamps | None:
    """Return name, device, inode, size and times of change of every weight file; None if they are not all here.

    A file that is written anew has others, even if it is given the old one's times.
    """
    if folder is None:
        return None
    try:
        stats = [(file.name, file.stat()) for file in sorted(_weight_paths(folder))]
    except (OSError, ModelDamaged):
        return None
    return [(name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats]


def require_unchanged(stamps: Stamps | None, folder: Path | None, name: str) -> None:
    """Refuse weight files that had these stamps before they were read, and have others now.

    Raises:
        ModelDamaged: what was read and what is there now may differ.
    """
    # Files that were fetched meanwhile had no stamps.
    if not set(stamps or ()) <= set(weight_stamps(folder) or ()):
        raise ModelDamaged(f"The weights of {name} changed while the model was loaded; load it again.")


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Return the type of each tensor in the weight files that are here, as safetensors calls it.

    Files that are missing or damaged are left out.
    """
    found: dict[str, str] = {}
    for path in _weight_paths(folder):
        with suppress(OSError, *_DAMAGED), path.open("rb", buffering=0) as file:
            found |= {name: entry["dtype"] for name, entry in _tensor_entries(_header(file)[1]).items()}
    return found


def _root(folder: Path) -> Path:
    """Return the folder that links may not leave; in a hub cache it is the repository's, whose blobs they name."""
    folder = folder.resolve()
    repository = folder.parent.parent
    return repository if folder.parent.name == "snapshots" and (repository / "blobs").is_dir() else folder


def _tokenizer_paths_within(folder: Path, name: str) -> Sequence[Path]:
    """Return the paths of the tokenizer's files, none of which is a link that leads out of the model `name`."""
    root, paths = _root(folder), sorted(_tokenizer_paths(folder))
    for path in paths:
        if not path.resolve().is_relative_to(root):
            raise ModelDamaged(f"{path.name} of {name} is a link that leads out of the model's folder; copy it in.")
    return paths


def _tokenizer_paths(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if any(fnmatch(path.name, pattern) for pattern in _TOKENIZER_FILES) and path.is_file():
            yield path
    templates = folder / _TEMPLATE_FOLDER
    if templates.is_dir():
        yield from (path for path in templates.glob("*.jinja") if path.is_file())


def _weight_paths(folder: Path, name: str = "") -> list[Path]:
    """Return the weight files that transformers loads: the only one, those of the index, or else all there are."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        return [folder / file for file in set(read_index(index.read_bytes(), name or folder.name).values())]
    return list(folder.glob("*.safetensors"))


def _tensor_samples(path: Path) -> Iterator[bytes]:
    """Yield, for each tensor of a safetensors file, its entry in the header and samples of its bytes."""
    with path.open("rb", buffering=0) as file:
        prefix, header = _header(file)
        first = len(prefix) + int.from_bytes(prefix, "little")
        try:
            for name, entry in _tensor_entries(header).items():
                start, end = entry["data_offsets"]  # counted from behind the header
                described = json.dumps([name, entry["dtype"], entry["shape"], end - start])
                yield described.encode() + b"".join(_samples(file, first + start, end - start))
        except _DAMAGED:  # which loading says in better words
            yield prefix + header


def _header(file: FileIO) -> tuple[bytes, bytes]:
    """Return the length of a safetensors file's header, as its bytes, and the header."""
    # A safetensors file: [8 bytes: length of the header | header, JSON | the tensors' bytes].
    prefix = os.pread(file.fileno(), 8, 0)
    return prefix, os.pread(file.fileno(), min(int.from_bytes(prefix, "little"), _MAX_HEADER_BYTES), 8)


def _tensor_entries(header: bytes) -> dict[str, _TensorEntry]:
    tensors: dict[str, _TensorEntry] = json.loads(header)
    tensors.pop("__metadata__", None)
    return tensors


def _samples(file: FileIO, start: int, size: int) -> Iterator[bytes]:
    """Yield evenly spaced samples of `size` bytes from `start` on, the first and the last ones among them."""
    last = size - _SAMPLE_BYTES
    if last <= _SAMPLE_BYTES * (_NUM_SAMPLES - 1):
        yield os.pread(file.fileno(), size, start)
        return
    for number in range(_NUM_SAMPLES):
        yield os.pread(file.fileno(), _SAMPLE_BYTES, start + last * number // (_NUM_SAMPLES - 1))
