"""Lists that a command line gives, separated by commas. Knows no command."""

from __future__ import annotations

import typer


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of a list, in order."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_floats(text: str) -> tuple[float, ...]:
    """Return the numbers of a list.

    Raises:
        BadParameter: it has something else.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 0,0.6,1") from error


def parse_ints(text: str) -> tuple[int, ...]:
    """Return the whole numbers of a list, each at least 1.

    Raises:
        BadParameter: it has something else.
    """
    values = parse_floats(text)
    if not all(value >= 1 and value.is_integer() for value in values):
        raise typer.BadParameter(f"{text!r} is no list of whole numbers from 1 on")
    return tuple(int(value) for value in values)
