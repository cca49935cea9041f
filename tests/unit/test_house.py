"""Rules of docs/principles.md that need no measuring: openings, leftovers, documented make targets.

What has a number for a bar, such as sizes and the route of a token, is measured by `make house`.
"""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_OPENING_LINES = 5

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


PACKAGE = _python_files("specsplit")
OUR_CODE = _python_files("specsplit", "benchmarks", "tests", "tools")


@cache
def _tree(path: Path) -> ast.Module:
    """Return a file's syntax tree; parsing all of them takes seconds, which is no business of who only collects."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    yield
    _tree.cache_clear()


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _comments(path: Path) -> Iterator[str]:
    with tokenize.open(path) as source:
        yield from (
            token.string for token in tokenize.generate_tokens(source.readline) if token.type == tokenize.COMMENT
        )


def test_a_tilde_is_replaced_in_one_place():
    """`Path.expanduser` raises RuntimeError for a user who does not exist, which no boundary expects."""
    is_call = re.compile(r"\bexpanduser\(")
    found = [_name(path) for path in OUR_CODE if is_call.search(path.read_text(encoding="utf-8"))]
    assert found == ["specsplit/core/paths.py"], "use core.paths.expanded"


def test_every_waiver_of_a_tool_names_its_rule():
    waiver = re.compile(r"#\s*(?:noqa(?!: [A-Z]+\d+)|type: ignore(?!\[)|pyright: ignore(?!\[)|ruff: noqa)")
    assert [_name(path) for path in OUR_CODE for comment in _comments(path) if waiver.search(comment)] == []


def test_each_file_opens_by_saying_what_it_is():
    # errors.py draws its tree there, so only the paragraph before the first blank line counts.
    openings = {
        _name(path): (ast.get_docstring(_tree(path)) or "").split("\n\n")[0].splitlines()
        for path in OUR_CODE
        if path.name != "__init__.py" or _tree(path).body
    }
    assert [name for name, lines in openings.items() if not 0 < len(lines) <= MAX_OPENING_LINES] == []


def test_packages_hold_no_code_of_their_own():
    """An `__init__` that imports would lend its edges to every module of the package and blur the floors."""
    inner = [path for path in PACKAGE if path.name == "__init__.py" and path.parent != ROOT / "specsplit"]
    assert inner
    assert [_name(path) for path in inner if _tree(path).body[1:] or (_tree(path).body and not _opens(path))] == []


def _opens(path: Path) -> bool:
    return ast.get_docstring(_tree(path)) is not None


def test_public_classes_and_functions_say_what_they_do():
    """A one-statement function (a predicate, a getter) may let its name speak; methods may lean on their port."""
    silent: list[str] = []
    for path in PACKAGE:
        for node in _tree(path).body:
            if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None and (isinstance(node, ast.ClassDef) or len(node.body) > 1):
                silent.append(f"{_name(path)}::{node.name}")
    assert silent == []


def test_nothing_is_left_for_later():
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK", "NotImplemented" + "Error")
    marks = re.compile(rf"\b(?:{'|'.join(words)})\b")
    assert [_name(path) for path in OUR_CODE if marks.search(path.read_text(encoding="utf-8"))] == []


def _texts() -> Iterator[Path]:
    yield from (ROOT / name for name in ("Makefile", "LICENSE", ".gitignore", ".ci/run"))
    yield from (path for path in ROOT.glob("*.*") if path.name != ".git")  # in a worktree, a file with its own path
    for folder in ("specsplit", "benchmarks", "tests", "tools", "docs"):
        yield from (ROOT / folder).rglob("*")


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    machine = re.compile(r"(?<![\w.~}])/(?:work|root|home|Users|opt/wheels)(?=/)".replace("work", "wo" + "rk"))
    kinds = {"", ".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".html", ".gitignore"}
    texts = [path for path in _texts() if path.is_file() and path.suffix in kinds and "embedded" not in path.parts]
    assert ROOT / "pyproject.toml" in texts
    assert [_name(path) for path in texts if machine.search(path.read_text(encoding="utf-8"))] == []


def test_every_make_target_is_documented_and_phony():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, flags=re.MULTILINE))
    documented = set(re.findall(r"^([a-z][a-z-]*):.*  ## \S", makefile, flags=re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert {"demo", "test", "test-all", "check", "house", "lint", "type", "bench-smoke", "clean", "help"} <= targets
    assert documented == targets
    assert phony is not None
    assert set(phony.group(1).split()) == targets


def test_torch_is_an_extra_and_its_range_carries_no_local_label():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [line for line in project["dependencies"] if line.startswith("torch")] == []
    assert "torch>=2.11,<2.14" in project["optional-dependencies"]["worker"]
    assert "+" not in (ROOT / "constraints.txt").read_text(encoding="utf-8")
