"""How tests are named, and that they read nothing private."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.house.measure import Measure, none_of
from tools.house.sources import Source, functions, last_name, sources

NAME_LENGTH = 70
_PUBLIC = {"_replace", "_asdict", "_fields", "_make"}
"""Methods of named tuples, whose underscore only avoids names of fields."""
_PATCHERS = {"setattr", "getattr", "delattr", "hasattr", "patch"}
_PRIVATE = re.compile(r"(?:^|\.)_(?!_)\w")


def measures() -> list[Measure]:
    """Return the measures of tests."""
    files = sources("tests", "benchmarks")
    long = [
        source.place(function, function.name)
        for source in files
        for function in functions(source)
        if function.name.startswith("test_") and len(function.name) >= NAME_LENGTH
    ]
    private = [place for source in files if _is_test(source) for place in private_reads(source)]
    return [
        none_of(f"names of tests of {NAME_LENGTH} characters or more", long),
        none_of("private names that tests read", private),
    ]


def _is_test(source: Source) -> bool:
    return source.name.startswith("tests/") or "/test_" in source.name


def private_reads(source: Source) -> Iterator[str]:
    foreign = {
        alias.asname or alias.name.partition(".")[0]
        for node in source.nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.name.startswith(("specsplit", "benchmarks"))
    }
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if last_name(node.value) not in {"self", "cls", "super", *foreign}:
                yield source.place(node, ast.unparse(node))
        elif isinstance(node, ast.Call) and last_name(node.func) in _PATCHERS:
            yield from (source.place(node, name) for name in _strings(node) if _PRIVATE.search(name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("specsplit", "benchmarks")):
            yield from (source.place(node, alias.name) for alias in node.names if _is_private(alias.name))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _strings(call: ast.Call) -> Iterator[str]:
    for argument in call.args[:2]:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value
