"""The fields of bodies that clients write in several ways, and the one form that each of them takes here."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field

from specsplit.core.ports import TemplateValue
from specsplit.limits import MAX_LOGIT_BIAS, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOKENS
from specsplit.model.template_variables import template_variables

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")
"""As one writes it, so that no id stands twice in one object."""


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in cast("list[object]", value))


def _prompts(value: object) -> object:
    """Return a list of prompts, each a text or token ids."""
    if isinstance(value, str) or (_is_list_of(value, int) and value):
        return [value]
    if isinstance(value, list):
        items = cast("list[object]", value)
        if items and all(isinstance(item, str) or _is_list_of(item, int) for item in items):
            return items
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")


def _stops(value: object) -> object:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not _is_list_of(stops, str) or len(cast("list[str]", stops)) > MAX_STOPS:
        raise ValueError(f"must be a text, or a list of at most {MAX_STOPS} texts")
    return tuple(cast("list[str]", stops))


def _biases(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        if len(items) > MAX_LOGIT_BIAS:
            raise ValueError(f"must have at most {MAX_LOGIT_BIAS} token ids")
        if all(_TOKEN_ID.fullmatch(key) and type(bias) in (int, float) for key, bias in items):
            with suppress(OverflowError):  # a whole number of hundreds of digits
                return tuple((int(key), float(cast("float", bias))) for key, bias in items)
    raise ValueError("must be an object of token ids and the numbers to add to their logits")


def _content(value: object) -> object:
    """Return the text of a message, which may come in parts; each of them begins a line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = cast("list[object]", value)
        # What else a text part has, such as `cache_control`, is not a part of the text.
        texts = [part.get("text") for part in map(_as_dict, parts) if part.get("type") == "text"]
        if len(texts) == len(parts) and _is_list_of(texts, str):
            return "\n".join(cast("list[str]", texts))  # as vLLM and llama.cpp do
    raise ValueError('must be a text, or a list of parts {"type": "text", "text": ...}: this server takes text alone')


def _variables(value: object) -> object:
    return {} if value is None else template_variables(value)


def none_is_empty(value: object) -> object:
    """Return an object that may be left out as null."""
    return {} if value is None else value


def _as_dict(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


class TextPart(BaseModel):
    """A part of a message's content, as /openapi.json describes it."""

    type: Literal["text"]
    text: str


Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOPS)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
# Types of what a client sends, where a validator makes something else of it: for /openapi.json alone.
_SentIds = Annotated[list[int], Field(min_length=1)]
_SentPrompts = str | _SentIds | Annotated[list[str | list[int]], Field(min_length=1)]
_SentStops = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None
_SentBiases = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None
_SentVariables = dict[str, TemplateValue | None] | None

Prompts = Annotated[list[str | list[int]], BeforeValidator(_prompts, json_schema_input_type=_SentPrompts)]
Stops = Annotated[tuple[_Stop, ...], BeforeValidator(_stops, json_schema_input_type=_SentStops)]
Biases = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_biases, json_schema_input_type=_SentBiases)]
Content = Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])]
TemplateVariables = Annotated[
    dict[str, TemplateValue], BeforeValidator(_variables, json_schema_input_type=_SentVariables)
]
