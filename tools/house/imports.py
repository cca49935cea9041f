"""Circles of imports between modules, and names of files that belong into the wing of stages."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from tools.house.measure import Measure, none_of
from tools.house.sources import Source, sources

STAGE_WORDS = ("stage_", "chain", "shard")
_STAGE_FOLDERS = ("specsplit/stages/", "specsplit/cli/")
Graph = dict[str, set[str]]


def measures() -> list[Measure]:
    """Return the measures of imports. An import inside a function counts: it, too, happens while the program runs."""
    found = [
        none_of(f"circles of imports in {folder}", circles(_graph(folder, for_types=False)))
        for folder in ("specsplit", "benchmarks", "tests")
    ]
    with_types = circles(_graph("specsplit", for_types=True))
    found.append(Measure("circles in specsplit, imports for types included", str(len(with_types)), places=with_types))
    return [*found, none_of("files of stages in other folders", _misplaced())]


def circles(graph: Graph) -> list[str]:
    """Return every largest group of modules that import one another, directly or not."""
    reach = {module: _reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return [" <-> ".join(group) for group in sorted(groups)]


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph[module]
    return found


def _graph(folder: str, *, for_types: bool) -> Graph:
    files = {source.module: source for source in sources(folder)}
    return {module: set(_imported(source, files.keys(), for_types)) for module, source in files.items()}


def _imported(source: Source, modules: Collection[str], for_types: bool) -> Iterator[str]:
    """Yield the modules that a file imports; importing a package runs its `__init__`, which holds no code here."""
    skipped: set[int] = set()
    if not for_types:
        skipped = {id(node) for block in _type_blocks(source) for node in ast.walk(block)}
    for node in source.nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules:
                    yield inner
                elif node.module in modules:
                    yield node.module


def _type_blocks(source: Source) -> Iterator[ast.If]:
    for node in source.nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield node


def _misplaced() -> list[str]:
    names = (source.name for source in sources("specsplit") if not source.name.startswith(_STAGE_FOLDERS))
    return [name for name in names if name.rpartition("/")[2].startswith(STAGE_WORDS)]
