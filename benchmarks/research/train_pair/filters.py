"""Which files are worth learning from, and the form in which they are kept. Pure functions on one file's text."""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from pathlib import PurePosixPath

MIN_BYTES, MAX_BYTES = 200, 200_000
MAX_LINE = 240
MAX_MEAN_LINE = 80
MIN_LETTERS = 0.35
MAX_DIGITS = 0.12
MAX_NON_ASCII = 0.02
HELD_OUT_PERCENT = 2
KEEPS_HEADER_ONE_IN = 4

_FOLDERS = re.compile(
    r"_?(unit)?test(s|ing|data|_data)?|conftest|fixtures|_?vendor(ed)?|third_?party|extern(als|ally_vendored)?|lib2to3|"
    r"idlelib|turtledemo|pydoc_data|encodings|locales?|migrations|site-packages|node_modules|_?gen(erated)?|_?pb2?"
)
_NAMES = re.compile(
    r"^(test_.*|.*_tests?|tests?|conftest|_version|version|versioneer|.*_pb2(_grpc)?|.*_generated|.*lextab|.*yacctab|"
    r".*parsetab|.*unicode_?(data|tables?|map).*|.*(idna|uts46|entity|entities|emoji|mime|country|currency)_?(data|codes|"
    r"types|table).*|fix_.*|setup)\.py$"
)
_GENERATED = re.compile(
    r"do not (edit|modify)|don't edit|@generated|auto[- ]?generated|automatically generated|machine[- ]generated|"
    r"(file|code|module|script) (was|is|has been) generated|generated (by|from|with|using)\b",
    re.IGNORECASE,
)
_HEADER = re.compile(r"\A(?:[ \t]*#[^\n]*\n|[ \t]*\n)+")
_TRAILING = re.compile(r"[ \t\f]+(?=\n)")
_BLANK_RUN = re.compile(r"\n{4,}")


def rejects_path(path: str) -> bool:
    """Tell whether the path alone names a test, a vendored copy, generated code or data."""
    parts = PurePosixPath(path.lower())
    return any(map(_FOLDERS.fullmatch, parts.parts[:-1])) or _NAMES.match(parts.name) is not None


def decoded(content: bytes) -> str | None:
    """Return the text of a file in the form it is kept in; None where it is no UTF-8 text or of unfit size.

    Line ends become newlines, tabs spaces; trailing blanks go, and runs of blank lines shrink to two.
    """
    if not MIN_BYTES <= len(content) <= MAX_BYTES:
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if "\0" in text or "<|endoftext|>" in text:
        return None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _TRAILING.sub("", text.expandtabs(4) + "\n")
    return _BLANK_RUN.sub("\n\n\n", text).strip("\n") + "\n"


def without_header(text: str) -> str:
    """Return a text without the comments that it begins with: mostly its licence."""
    return _HEADER.sub("", text)


def reason_to_reject(text: str) -> str | None:
    """Return why a decoded text is not used, or None."""
    if len(without_header(text)) < MIN_BYTES:
        return "size or encoding"
    if _GENERATED.search(text[:3000]):
        return "generated"
    lines = text.splitlines()
    if max(map(len, lines)) > MAX_LINE or len(text) > MAX_MEAN_LINE * len(lines):
        return "long lines"
    if sum(character.isalpha() for character in text) < MIN_LETTERS * len(text):
        return "data"
    if sum(character.isdigit() for character in text) > MAX_DIGITS * len(text):
        return "data"
    if len(text.encode()) - len(text) > MAX_NON_ASCII * len(text):
        return "other script"
    return _reason_of_syntax(text)


def _reason_of_syntax(text: str) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return "not Python 3"
    kinds = [type(node) for node in ast.walk(tree)]
    if kinds.count(ast.Constant) > 0.45 * len(kinds):
        return "data"
    return None


def fingerprint(text: str) -> str:
    """Return the SHA-256 of a text whatever its header and whitespace: what the split and exact duplicates go by."""
    return hashlib.sha256(" ".join(without_header(text).split()).encode()).hexdigest()


def is_held_out(digest: str) -> bool:
    """Tell whether a file is kept for evaluation: a fixed rule, so that every build holds out the same files."""
    return int(digest, 16) % 100 < HELD_OUT_PERCENT


def keeps_header(digest: str) -> bool:
    """Tell whether a file is kept with its header: all held-out ones, and one in four of those trained on.

    Licences are few and soon known by heart; the time that they would take is better spent on code.
    """
    return is_held_out(digest) or int(digest[:8], 16) % KEEPS_HEADER_ONE_IN == 0
