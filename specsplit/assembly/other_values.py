"""Answers to values that mean something in another program only, such as a dtype bfloat16 or a seed of -1.

Imports nothing heavy: every start of the command line has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

from specsplit.core.errors import InvalidSettings

DTYPES = {
    **dict.fromkeys(("bfloat16", "torch.bfloat16", "BF16"), "here it is bf16"),
    **dict.fromkeys(("float16", "half", "torch.float16", "F16"), "here it is fp16"),
    **dict.fromkeys(("float32", "float", "torch.float32", "F32"), "here it is fp32"),
    **dict.fromkeys(("q8_0", "Q8_0"), "here it is int8"),
    **dict.fromkeys(("q4_0", "Q4_0", "q4_K_M", "Q4_K_M"), "here it is int4"),
    "auto": "leave it out for the checkpoint's own",
}
"""The ends of sentences about other programs' names of number formats."""
_TASK = "text-generation"
_NUMBERS: dict[str, tuple[int, str]] = {
    "max_new_tokens": (-1, "a number as large as the context goes on to the end of the text"),
    "context": (0, "leave it out for the model's own"),
    "seed": (-1, "leave it out for a random one"),
}
"""The number with which llama.cpp asks for its default, by setting, and the end of a sentence about it."""
_PLACES = {"target": "target_model", "draft": "draft_model"}
"""The settings of workers elsewhere, and those of models that are loaded."""
_ADDRESS = re.compile(r"[A-Za-z0-9.-]+:\d+")
_MODEL = re.compile(r"[./~].*|[\w.-]+/[\w.-]+")


def refuse_other_values(given: Mapping[str, object], spell: Callable[[str], str] = str) -> None:
    """Refuse values of other programs, which mean nothing here; `spell` writes a setting as the user would.

    Raises:
        InvalidSettings: there is one; the message has what to write.
    """
    for name, values in given.items():
        # Several targets of a gateway stand in a list.
        for value in cast("list[object]", values) if isinstance(values, list) else [values]:
            answer = _answer(name, value, spell)
            if answer is not None:
                raise InvalidSettings(f"{spell(name)} cannot be {value}; {answer}.")


def _answer(name: str, value: object, spell: Callable[[str], str]) -> str | None:
    """Return the end of a sentence about a value; None if it may be right."""
    if name == "dtype" and isinstance(value, str):
        return DTYPES.get(value)
    if name == "device" and isinstance(value, int):
        return f"here it is cuda:{value}"
    if name == "target_model" and value == _TASK:
        return "leave the task out, and name the model alone"
    if name in _NUMBERS:
        number, words = _NUMBERS[name]
        return words if value == number and not isinstance(value, bool) else None
    if name in _PLACES and isinstance(value, str) and _MODEL.fullmatch(value):
        return f"it takes the HOST:PORT of a worker, and {spell(_PLACES[name])} takes a model"
    place = next((place for place, model in _PLACES.items() if model == name), None)
    if place is not None and isinstance(value, str) and _ADDRESS.fullmatch(value):
        return f"it takes a model, and {spell(place)} takes the HOST:PORT of a worker"
    return None
