"""How docstrings begin, how many lines are comments, and whether every page that is named exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tools.house.measure import Measure, none_of
from tools.house.sources import ALL_FOLDERS, ROOT, Source, sources

FRAGMENT_WORDS = ("Of", "By", "Since", "Where", "What")
"""A docstring that begins with one of them is a fragment or an inverted clause."""
PRIVATE_PHRASES = re.compile(r"\b(?:told|take note|what comes of)\b", re.IGNORECASE)
"""Phrases that say less than a plain verb, such as return, record or send."""
COMMENT_SHARE = 0.015
_WAIVER = re.compile(r"#\s*(?:noqa|type:|pyright:|ruff:|fmt:)")
_PAGE = re.compile(r"(?<![\w*])[\w][\w.-]*\.md\b")
_DATA = ("benchmarks/results", "specsplit/model/embedded")


def measures() -> list[Measure]:
    """Return the measures of prose."""
    found = [place for source in sources("specsplit") for place in fragments(source)]
    private = [place for source in sources("specsplit") for place in private_phrases(source)]
    return [
        none_of("docstrings that begin as fragments", found),
        none_of("docstrings with phrases of a private dialect", private),
        *_comments(),
        _pages(),
    ]


def fragments(source: Source) -> Iterator[str]:
    """Yield the places of docstrings that begin with one of the words."""
    for node in _docstrings(source):
        text = str(node.value).lstrip()
        if text and re.split(r"\W", text, maxsplit=1)[0] in FRAGMENT_WORDS:
            yield f"{source.place(node)}  {text.splitlines()[0]}"


def private_phrases(source: Source) -> Iterator[str]:
    """Yield the places of docstrings that use one of the phrases."""
    for node in _docstrings(source):
        if match := PRIVATE_PHRASES.search(str(node.value)):
            yield f"{source.place(node)}  {match[0]}"


def _docstrings(source: Source) -> Iterator[ast.Constant]:
    """Yield every string that stands as a statement of its own: docstrings, those of attributes included."""
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _comments() -> list[Measure]:
    num_lines: dict[str, int] = defaultdict(int)
    num_comments: dict[str, int] = defaultdict(int)
    for source in sources("specsplit"):
        count = _num_comment_lines(source)
        for package in ("specsplit/**", source.package):
            num_lines[package] += source.num_lines
            num_comments[package] += count
    # Files at the top of the package are few and short, so they count in the whole only.
    del num_lines["specsplit"]
    return [_comment_share(package, num_comments[package], num_lines[package]) for package in sorted(num_lines)]


def _comment_share(package: str, num_comments: int, num_lines: int) -> Measure:
    share = num_comments / num_lines
    bar = f">= {COMMENT_SHARE:.1%}" if package == "specsplit/**" else ""
    return Measure(f"comment lines of {package}", f"{share:.2%}", bar, not bar or share >= COMMENT_SHARE)


def _num_comment_lines(source: Source) -> int:
    """Return the number of lines that are a comment and no waiver of a tool; comments behind code do not count."""
    return sum(
        token.line.lstrip().startswith("#") and not _WAIVER.match(token.string) and len(token.string) > 2
        for token in source.comments
    )


def _pages() -> Measure:
    existing = {path.name for path in ROOT.rglob("*.md") if ".venv" not in path.parts}
    missing = [
        f"{name}:{number} {page}"
        for name in _texts()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1)
        for page in _PAGE.findall(line)
        if page not in existing
    ]
    return none_of("pages named that do not exist", missing)


def _texts() -> Iterator[str]:
    yield from (source.name for source in sources(*ALL_FOLDERS))
    pages = [*ROOT.glob("*.md"), *(path for folder in ("docs", *ALL_FOLDERS) for path in (ROOT / folder).rglob("*.md"))]
    names = sorted(path.relative_to(ROOT).as_posix() for path in pages)
    yield from (name for name in names if not Path(name).as_posix().startswith(_DATA))
