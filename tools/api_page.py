"""Writes docs/api.md, the reference of the Python API, from the docstrings: `python -m tools.api_page`."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
_HEAD = """# Python API

Generated from the docstrings by `make api-page`; edit those. All names are imported from `specsplit`, on first use:
`import specsplit` itself is quick and imports no torch.

    from specsplit import Pipeline

    with Pipeline() as pipeline:
        result = pipeline.generate("def fibonacci(n):", max_new_tokens=64)
        print(result.text)

With workers elsewhere, in asyncio, without torch:

    from specsplit import Client

    async with Client("target-host:7001", "draft-host:7002", insecure=True) as client:  # or with tls_cert= ...
        async for chunk in client.stream([{"role": "user", "content": "Hi"}], temperature=0.7):
            print(chunk.text, end="")
"""
_CLASSES = (
    ("specsplit/api.py", "Pipeline"),
    ("specsplit/client.py", "Client"),
    ("specsplit/assembly/arguments.py", "RequestOptions"),
    ("specsplit/assembly/arguments.py", "ClientOptions"),
    ("specsplit/assembly/arguments.py", "PipelineOptions"),
    ("specsplit/orchestrator/request.py", "Result"),
    ("specsplit/orchestrator/request.py", "Chunk"),
    ("specsplit/orchestrator/request.py", "RequestTimings"),
    ("specsplit/orchestrator/request.py", "SpeculativeDecoding"),
)
_ERRORS = "specsplit/core/errors.py"


def page() -> str:
    """Return the page."""
    parts = [_HEAD, *(_class_section(_class(path, name)) for path, name in _CLASSES), _error_section()]
    return "\n".join(parts)


def _class(path: str, name: str) -> ast.ClassDef:
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def _class_section(node: ast.ClassDef) -> str:
    parts = [f"## {node.name}\n"]
    constructor = next((each for each in _functions(node) if each.name == "__init__"), None)
    if constructor is not None:
        parts.append(f"    {node.name}({_arguments(constructor)})\n")
    parts += [_prose(node), *_inherited(node)]
    if rows := _field_rows(node):
        parts.append("| field | type | |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    parts += [_method_section(each) for each in _methods(node)]
    return "\n".join(parts)


def _inherited(node: ast.ClassDef) -> list[str]:
    """Return a sentence for each class of this page whose fields the class has, too."""
    names = {name for _, name in _CLASSES}
    bases = [each.id for each in node.bases if isinstance(each, ast.Name) and each.id in names]
    return [f"It also has all fields of [{name}](#{name.lower()}).\n" for name in bases]


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the public methods and properties; an overload has no text of its own."""
    public = [each for each in _functions(node) if not each.name.startswith("_")]
    return [each for each in public if "overload" not in map(ast.unparse, each.decorator_list)]


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ").removeprefix("self")


def _method_section(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    returned = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    word = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    if "property" in decorators:
        signature = f"{node.name}: {returned.removeprefix(' -> ')}"
    else:
        signature = f"{word}{node.name}({_arguments(node)}){returned}"
    return f"### {node.name}\n\n    {signature}\n\n{_prose(node)}"


def _prose(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a docstring; what it raises becomes a list."""
    text, raises, errors = (ast.get_docstring(node) or "").partition("Raises:\n")
    lines = [line.strip() for line in inspect.cleandoc(errors).splitlines()]
    listed = "Raises:\n\n" + "\n".join(f"- {line}" for line in _joined(lines)) + "\n" if raises else ""
    return f"{text.rstrip()}\n" + (f"\n{listed}" if listed else "")


def _joined(lines: list[str]) -> list[str]:
    """Return the entries of a list; a line that names no error goes on with the one before it."""
    entries: list[str] = []
    for line in lines:
        if ":" in line.split(" ")[0] or line.split(",")[0].isidentifier() or not entries:
            entries.append(line)
        else:
            entries[-1] += f" {line}"
    return entries


def _field_rows(node: ast.ClassDef) -> list[str]:
    rows: list[str] = []
    for index, each in enumerate(node.body):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        text = ""
        if index + 1 < len(node.body) and isinstance(following := node.body[index + 1], ast.Expr):
            text = inspect.cleandoc(str(ast.literal_eval(following.value))).replace("\n", " ")
        kind = ast.unparse(each.annotation).replace("|", "\\|")
        rows.append(f"| `{each.target.id}` | `{kind}` | {text} |")
    return rows


def _error_section() -> str:
    module = ast.parse((ROOT / _ERRORS).read_text(encoding="utf-8"))
    said = (ast.get_docstring(module) or "").partition("\n\n")[2]
    tree = "\n".join(f"    {line}" for line in said.splitlines())
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    rows = [f"| `{node.name}` | {' '.join((ast.get_docstring(node) or '').split())} |" for node in classes]
    intro = "Every error that SpecSplit raises on purpose is one of these, and its text is one sentence."
    return f"## Errors\n\n{intro}\n\n{tree}\n\n| error | |\n|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
