"""Words for a value that pydantic refused: what it must be, and what it was. Knows neither options nor settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_RULES: dict[str, str] = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "value_error": "{error}",
    "missing": "is missing",
}
"""Words for a kind of error of pydantic; the braces are filled with the context that it gives."""
_KINDS: tuple[tuple[str | tuple[str, ...], str], ...] = (
    ("int_", "must be a whole number"),
    ("float_", "must be a number"),
    ("bool_", "must be true or false"),
    ("string_", "must be a text"),
    (("tuple_", "list_"), "must be a list"),
    (("dict_", "model_"), "must be an object"),
)
"""Words for the beginnings of pydantic's remaining kinds of error."""


def complaint(error: ValidationError) -> str:
    """Return what the first refused value must be and what it was, such as "must be at least 1, not 0"."""
    # Only the first complaint is shown: the next ones may follow from it.
    first = error.errors(include_url=False)[0]
    value = first["input"]
    return rule(first) + (f", not {value!r}" if isinstance(value, str | int | float) else "")


def rule(details: ErrorDetails) -> str:
    """Return what a refused value must be, such as "must be at least 1"; `details` have their context."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        # pydantic lists the choices as "'a', 'b' or 'c'".
        return f"must be {str(context['expected']).replace(chr(39), '')}"
    # Bounds of a float are floats: 1.0 is what a user would write as 1.
    if kind in _RULES:
        shown = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
        return _RULES[kind].format(**shown)
    return next((words for start, words in _KINDS if kind.startswith(start)), details["msg"])
