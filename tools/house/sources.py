"""The repository's Python files, each parsed and walked once; generated messages are left out."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALL_FOLDERS = ("specsplit", "benchmarks", "tests", "tools", "proto")
_GENERATED = "specsplit/rpc/pb/"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its name from the root of the repository, its text and its syntax tree."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, from the top down."""
        return list(ast.walk(self.tree))

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        """Name as an import says it."""
        parts = Path(self.name).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """Folder in the table of comments: `specsplit/engine`, or `specsplit` for the files at its top."""
        return "/".join(Path(self.name).parts[:-1][:2])

    @cached_property
    def comments(self) -> list[tokenize.TokenInfo]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token for token in tokens if token.type == tokenize.COMMENT]

    def place(self, node: ast.stmt | ast.expr, name: str = "") -> str:
        return f"{self.name}:{node.lineno}" + (f" {name}" if name else "")


def sources(*folders: str) -> list[Source]:
    """Return the files of the folders, in the order of their names."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    return [_read(name) for name in names if not name.startswith(_GENERATED)]


_read_files: dict[str, Source] = {}


def _read(name: str) -> Source:
    if name not in _read_files:
        _read_files[name] = Source(name, (ROOT / name).read_text(encoding="utf-8"))
    return _read_files[name]


def functions(source: Source) -> Iterator[Function]:
    return (node for node in source.nodes if isinstance(node, Function))


def classes(source: Source) -> Iterator[ast.ClassDef]:
    return (node for node in source.nodes if isinstance(node, ast.ClassDef))


def last_name(node: ast.expr) -> str:
    """Return the last part of a name, such as `c` for `a.b.c`, `a.b.c(...)` and `a.b.c[...]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
