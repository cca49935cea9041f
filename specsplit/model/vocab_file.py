"""A draft's vocabulary as users name it: a number, or a file of `specsplit draft-vocab`. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsplit.core.errors import InvalidRequest, InvalidSettings
from specsplit.core.paths import expanded

_KIND = "specsplit draft vocabulary"


@dataclass(frozen=True, slots=True)
class VocabFile:
    """The content of a file: token ids, and the hash of the vocabulary that they belong to."""

    path: str
    vocab_hash: str
    token_ids: Sequence[int]


ALL = "all"
DEFAULT_DRAFT_VOCAB = 32_768
"""Tokens of a draft's vocabulary, if nobody says otherwise, where it has one.

Measured: of code and English they are 91 to 97 % with cl100k's tokenizer (docs/adr/0037).
"""


def parse_draft_vocab(chosen: str) -> int | VocabFile | None:
    """Return the number that "N" is, or else the content of the file of that name; None for "all".

    Raises:
        InvalidSettings: the number is 0, there is no such file, or it is none of `write_vocab_file`.
    """
    if chosen == ALL:
        return None
    # isdigit() is true of superscripts, too, which are no numbers; longer numbers are no vocabulary.
    if re.fullmatch(r"[0-9]{1,18}", chosen) is None:
        return _read(chosen)
    if int(chosen) == 0:
        raise InvalidSettings("A draft vocabulary of 0 tokens proposes nothing: give --draft-vocab 1 or more.")
    return int(chosen)


def write_vocab_file(path: Path, token_ids: Sequence[int], vocab_hash: str) -> None:
    """Write a list of ids with the hash of the vocabulary that they belong to.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    found = {"kind": _KIND, "vocab_hash": vocab_hash, "token_ids": list(token_ids)}
    try:
        path.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written ({error.strerror}); choose another --output.") from error


def _read(path: str) -> VocabFile:
    try:
        found: Any = json.loads(expanded(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettings(
            f"The draft vocabulary {path} cannot be read ({error.strerror}); make one with specsplit draft-vocab, or "
            "give a number."
        ) from error
    except (ValueError, RecursionError):
        found = None
    content: dict[str, Any] = found if isinstance(found, dict) and found.get("kind") == _KIND else {}
    vocab_hash, token_ids = content.get("vocab_hash"), content.get("token_ids")
    if not isinstance(vocab_hash, str) or not isinstance(token_ids, list) or not _are_ids(token_ids):
        raise InvalidSettings(f"{path} holds no draft vocabulary; make one with specsplit draft-vocab.")
    return VocabFile(path, vocab_hash, token_ids)


def _are_ids(items: list[object]) -> bool:
    # A truth value is an int, too.
    return len(items) > 0 and all(type(item) is int for item in items)
