"""Words for what the parser of options refuses. Knows the parser, and no option."""

from __future__ import annotations

import re
from typing import Any

import typer
from pydantic import ValidationError

from specsplit.assembly.other_values import DTYPES
from specsplit.cli.other_programs import in_our_words
from specsplit.core.complaints import complaint

_QUOTED_OPTION = re.compile(r"'(-[^' ]+)'")
_CHOICE = re.compile(r"'(?P<given>.*)' is not one of (?P<choices>.*?)\.?$", re.DOTALL)


def usage_sentence(error: Exception) -> str | None:
    """Return one sentence for an error of the parser; None for any other error."""
    # Its errors have this method; their classes are not the same in every version of typer.
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    said = sentence(message())
    if said.startswith("Option '--help' does not take a value"):
        return "Option --help takes no value; --help-all shows every option."
    # An error about one option names it; one about the whole line, such as an unknown option, has none.
    param: Any = getattr(error, "param", None)
    if param is not None:
        shown = _shown(param)
        said = f"{shown} {_rule(error, said, shown)}."
    plain = _QUOTED_OPTION.sub(r"\1", in_our_words(said, getattr(error, "ctx", None)))
    return f"{plain} See --help."


def _shown(param: Any) -> str:
    """Return the option as it is typed, or the name of an argument in capitals."""
    name = max(param.opts, key=len)
    return name if name.startswith("-") else str(param.metavar or name.upper())


def _rule(error: Exception, said: str, shown: str) -> str:
    if said.startswith("Missing "):
        return "is missing"
    choice = _CHOICE.search(str(getattr(error, "message", "")))
    if choice is not None:
        choices = choice["choices"].replace("'", "")
        answer = DTYPES.get(choice["given"]) if shown == "--dtype" else None
        return f"must be one of {choices}, not {choice['given']!r}" + (f"; {answer}" if answer else "")
    if isinstance(error, typer.BadParameter) and isinstance(error.__cause__, ValidationError):
        return complaint(error.__cause__)
    return f"is wrong: {said.rstrip('.')}"


def sentence(text: str) -> str:
    """Return `text` on one line, ending as a sentence does."""
    text = " ".join(text.split())
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."
