"""Budgets of files, functions and classes, and the few exceptions from them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tools.house.exceptions import EXCEPTIONS, MAX_EXCEPTIONS
from tools.house.measure import Measure, at_most, none_of
from tools.house.sources import ALL_FOLDERS, Function, Source, classes, functions, last_name, sources

FILE_LINES, FUNCTION_LINES, CLASS_LINES = 400, 60, 200
ATTRIBUTES, PARAMETERS = 12, 6
PRODUCT = ("specsplit", "benchmarks")
"""The object budgets hold here; files and functions are measured in every folder."""
CORE_LINES, BENCHMARK_LINES = 1700, 6000
_RECORD_BASES = {"NamedTuple", "TypedDict", "Protocol", "BaseModel", "BaseSettings", "Exception", "BaseException"}
_RECORD_DECORATORS = {"dataclass", "record"}
_OPTION = re.compile(r"\btyper\.(?:Option|Argument|Context)\b|\b_option\(")


@dataclass(frozen=True, slots=True)
class _Size:
    rule: str
    key: str
    """As in EXCEPTIONS."""
    value: int
    bar: int


def measures() -> list[Measure]:
    """Return the measures of sizes."""
    sizes = [*_file_sizes(), *_function_sizes(), *_class_sizes(), *_parameter_counts()]
    over = [size for size in sizes if size.value > size.bar]
    found: list[Measure] = []
    for rule, bar in {size.rule: size.bar for size in sizes}.items():
        worst = max(size.value for size in sizes if size.rule == rule and size.key not in EXCEPTIONS)
        missed = sorted((size for size in over if size.rule == rule), key=lambda size: -size.value)
        places = [f"{size.value:5d}  {size.key}" for size in missed if size.key not in EXCEPTIONS]
        found.append(at_most(rule, worst, bar, places))
    return [*found, *_exceptions({size.key for size in over}), *_totals()]


def _file_sizes() -> Iterator[_Size]:
    for source in sources(*ALL_FOLDERS):
        yield _Size("lines of a file", source.name, source.num_lines, FILE_LINES)


def _function_sizes() -> Iterator[_Size]:
    for source in sources(*ALL_FOLDERS):
        for function in functions(source):
            yield _Size("lines of a function", f"{source.name}::{function.name}", _num_lines(function), FUNCTION_LINES)


def _class_sizes() -> Iterator[_Size]:
    records = _record_classes()
    for source in sources(*PRODUCT):
        for node in classes(source):
            key = f"{source.name}::{node.name}"
            yield _Size("lines of a class", key, _num_lines(node), CLASS_LINES)
            if node.name not in records:
                yield _Size("attributes of a class", key, len(attributes(node)), ATTRIBUTES)


def _parameter_counts() -> Iterator[_Size]:
    for source in sources(*PRODUCT):
        owners = {method: node for node in classes(source) for method in node.body if isinstance(method, Function)}
        for function in functions(source):
            if not _is_command(function) and not _is_kernel(function):
                count = num_parameters(function, owners.get(function))
                yield _Size("parameters of a function", f"{source.name}::{function.name}", count, PARAMETERS)


def _is_command(function: Function) -> bool:
    """Return whether typer calls the function: it is decorated as a command or has an annotated option."""
    if any(last_name(decorator) == "command" for decorator in function.decorator_list):
        return True
    annotations = [argument.annotation for argument in function.args.args if argument.annotation is not None]
    return any(_OPTION.search(ast.unparse(annotation)) for annotation in annotations)


def _is_kernel(function: Function) -> bool:
    """Return whether the function is compiled for a GPU, which takes addresses, strides and sizes one by one."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def num_parameters(function: Function, owner: ast.ClassDef | None) -> int:
    """Return the number of parameters that a caller may give, self and cls left out; stars count as none."""
    given = function.args
    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
    has_self = owner is not None and function in owner.body and "staticmethod" not in _decorators(function)
    return count - has_self


def _decorators(node: Function | ast.ClassDef) -> set[str]:
    return {last_name(decorator) for decorator in node.decorator_list}


def _num_lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that the methods of a class assign on self."""
    found: set[str] = set()
    for method in node.body:
        if not isinstance(method, Function) or not method.args.args:
            continue
        itself = method.args.args[0].arg
        for part in ast.walk(method):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and last_name(part.value) == itself:
                found.add(part.attr)
    return found


def _record_classes() -> set[str]:
    """Return the classes whose attributes are fields: records, settings, named tuples and errors, or derived of one."""
    bases: dict[str, set[str]] = defaultdict(set)
    found = set(_RECORD_BASES)
    for source in sources(*PRODUCT):
        for node in classes(source):
            bases[node.name] |= {last_name(base) for base in node.bases}
            if _RECORD_DECORATORS & _decorators(node):
                found.add(node.name)
    while derived := {name for name, above in bases.items() if name not in found and above & found}:
        found |= derived
    return found


def _exceptions(over: set[str]) -> list[Measure]:
    waivers = [source.name for source in sources(*ALL_FOLDERS) if _waives_complexity(source)]
    listed = [*EXCEPTIONS, *waivers]
    unfounded = [name for name, reason in EXCEPTIONS.items() if len(reason.split()) < 4]
    unneeded = [f"{name} is within its budget by now" for name in sorted(EXCEPTIONS.keys() - over)]
    return [
        at_most("exceptions", len(listed), MAX_EXCEPTIONS, listed),
        none_of("exceptions without need or reason", [*unfounded, *unneeded]),
    ]


def _waives_complexity(source: Source) -> bool:
    return any(re.search(r"noqa:.*\bC901\b", comment.string) for comment in source.comments)


def _totals() -> list[Measure]:
    core = sum(source.num_lines for source in sources("specsplit/core"))
    harness = [source for source in sources("benchmarks") if not source.name.startswith("benchmarks/research/")]
    return [
        at_most("lines of core", core, CORE_LINES),
        at_most("lines of benchmarks but research", sum(source.num_lines for source in harness), BENCHMARK_LINES),
    ]
