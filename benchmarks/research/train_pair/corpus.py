"""The corpus: reads sources, filters, removes duplicates, splits, and writes one compressed file with a manifest.

A file is one line of JSON: package, path, text, and whether it is held out. Their order is that of their hashes, which
is a fixed shuffle. Knows no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.research.train_pair.duplicates import Duplicates
from benchmarks.research.train_pair.files import write_whole
from benchmarks.research.train_pair.filters import (
    HELD_OUT_PERCENT,
    decoded,
    fingerprint,
    is_held_out,
    keeps_header,
    reason_to_reject,
    rejects_path,
    without_header,
)
from benchmarks.research.train_pair.sources import Package, Source, download, package_sources, standard_library
from specsplit.core.errors import InvalidSettings

MAX_PACKAGE_BYTES = 5_000_000
"""Limit of one package's training text; its held-out text gets the percentage that is held out at all, so that no
style outweighs the others; the files that stay are those first by hash."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Document:
    """One file of the corpus."""

    package: str
    path: str
    text: str
    held_out: bool


@dataclass(frozen=True, slots=True)
class Built:
    """A corpus in memory; `digests` stand beside `documents`."""

    documents: list[Document]
    rejected: Counter[str]
    held_out_share_in_train: float


def candidates(sources: Iterable[Source], rejected: Counter[str]) -> Iterator[tuple[str, Document]]:
    """Yield (digest, document) of the files that pass on their own; count the others by reason."""
    for source in sources:
        if rejects_path(source.path):
            rejected["path"] += 1
            continue
        text = decoded(source.content)
        reason = "size or encoding" if text is None else reason_to_reject(text)
        if text is None or reason is not None:
            rejected[reason or ""] += 1
            continue
        digest = fingerprint(text)
        text = text if keeps_header(digest) else without_header(text)
        yield digest, Document(source.package, source.path, text, is_held_out(digest))


def build(sources: Iterable[Source], prompts: Sequence[str], max_bytes: int | None = None) -> Built:
    """Return the corpus of `sources`; `max_bytes` keeps so much training text, first by hash."""
    rejected: Counter[str] = Counter()
    found = sorted(candidates(sources, rejected), key=lambda pair: (not pair[1].held_out, pair[0], pair[1].path))
    duplicates = Duplicates(list(prompts))
    kept: list[Document] = []
    per_package: Counter[tuple[bool, str]] = Counter()
    num_train_bytes = 0
    for digest, document in found:
        size = len(document.text.encode())
        allowed = MAX_PACKAGE_BYTES * (HELD_OUT_PERCENT / 100 if document.held_out else 1)
        if per_package[document.held_out, document.package] + size > allowed:
            rejected["package is full"] += 1
            continue
        if not document.held_out and max_bytes is not None and num_train_bytes + size > max_bytes:
            rejected["corpus is full"] += 1
            continue
        reason = duplicates.reason_to_reject(digest, without_header(document.text), document.held_out)
        if reason is not None:
            rejected[reason] += 1
            continue
        kept.append(document)
        per_package[document.held_out, document.package] += size
        if not document.held_out:
            num_train_bytes += size
    return Built(kept, rejected, duplicates.held_out_share_in_train)


def gather(packages: Sequence[Package], wheels: Path, pip_arguments: Sequence[str], tell: Tell) -> Iterator[Source]:
    """Download what is missing, then read the standard library and every package; packages not found are left out."""
    tell(f"downloading {len(packages)} packages")
    missing = download(packages, wheels, pip_arguments)
    if missing:
        tell("not found, left out: " + ", ".join(package.requirement for package in missing))
    tell("reading the standard library")
    yield from standard_library()
    for number, package in enumerate(packages):
        if number % 50 == 0:
            tell(f"reading package {number + 1} of {len(packages)}")
        yield from package_sources(package, wheels)


def write(path: Path, built: Built, packages: Sequence[Package]) -> dict[str, object]:
    """Write the corpus whole or not at all, and its manifest beside it; return the manifest."""
    lines = (
        json.dumps([document.package, document.path, int(document.held_out), document.text], ensure_ascii=False)
        for document in built.documents
    )
    packed = lzma.compress("\n".join(lines).encode(), preset=6)
    write_whole(path, packed)
    record = manifest(built, packages, packed)
    write_whole(manifest_path(path), json.dumps(record, indent=1).encode())
    return record


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name.partition(".")[0] + ".manifest.json")


def manifest(built: Built, packages: Sequence[Package], packed: bytes) -> dict[str, object]:
    """Return what the corpus is made of, in JSON types."""
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    split: Counter[str] = Counter()
    for document in built.documents:
        size = len(document.text.encode())
        sizes[document.package] += size
        files[document.package] += 1
        side = "held_out" if document.held_out else "train"
        split[f"{side}_bytes"] += size
        split[f"{side}_files"] += 1
    python = Package("python", platform.python_version(), "PSF-2.0")
    return {
        **split,
        "compressed_bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
        "held_out_windows_in_train": round(built.held_out_share_in_train, 4),
        "rejected": dict(built.rejected.most_common()),
        "packages": [
            {"name": p.name, "version": p.version, "licence": p.licence, "files": files[p.name], "bytes": sizes[p.name]}
            for p in (python, *packages)
            if files[p.name]
        ],
    }


def read(path: Path) -> list[Document]:
    """Return the documents of a corpus file.

    Raises:
        InvalidSettings: there is no such file, or it is damaged.
    """
    try:
        text = lzma.decompress(path.read_bytes()).decode()
        rows = [json.loads(line) for line in text.split("\n")]
        return [Document(package, name, body, bool(held_out)) for package, name, held_out, body in rows]
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise InvalidSettings(f"The corpus file {path} cannot be read ({error}).") from error
