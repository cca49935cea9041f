"""The variables that a request may give to a chat template beside its messages: what they may be, and which it reads.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import cast

from specsplit.core.errors import InvalidRequest
from specsplit.core.ports import TemplateValue, Variables
from specsplit.limits import MAX_TEMPLATE_TEXT, MAX_TEMPLATE_VARIABLES

PARAM = "chat_template_kwargs"
"""The name of the field, option and setting."""
OURS = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        # Other arguments of transformers' functions that render, and jinja2's own name for a template.
        *("tokenize", "conversation", "conversations", "return_assistant_tokens_mask", "self"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        "additional_special_tokens",
    )
)
"""Names that a template is given by the server or by its model alone."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_LARGEST = 1 << 63
_MAX_LISTED = 20


def template_variables(value: object) -> dict[str, TemplateValue]:
    """Return the variables that a request gives, without those that are None.

    Raises:
        ValueError: they are malformed; the message is the end of a sentence that begins with the name of the field.
    """
    if not isinstance(value, Mapping):
        raise ValueError('must be an object, such as {"enable_thinking": false}')
    variables: dict[str, TemplateValue] = {}
    for name, each in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError("must have names of at most 64 letters, digits and underscores")
        if name in OURS:
            raise ValueError(f"must not have {name}, which only the server and the model set")
        if each is not None:
            variables[name] = _checked(name, each)
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"must have at most {MAX_TEMPLATE_VARIABLES} names")
    return variables


def _checked(name: str, value: object) -> TemplateValue:
    if isinstance(value, str):
        if len(value) > MAX_TEMPLATE_TEXT:
            raise ValueError(f"must have a text of at most {MAX_TEMPLATE_TEXT} characters as {name}")
        if _HALF_CHARACTER.search(value):
            raise ValueError(f"must have a text of whole characters as {name}")
    elif not isinstance(value, bool | int | float):
        raise ValueError(f"must have true or false, a number or a text as {name}")
    elif abs(value) > _LARGEST or math.isnan(value):
        raise ValueError(f"must have a finite number of at most 2^63 as {name}")
    return value


def checked_variables(value: object) -> dict[str, TemplateValue]:
    """Return the variables as `template_variables` does.

    Raises:
        InvalidRequest: they are malformed.
    """
    try:
        return template_variables(value)
    except ValueError as error:
        raise InvalidRequest(f"{PARAM} {error}.", param=PARAM) from error


def refuse_unread(variables: Variables, read: Collection[str], set_by_model: Collection[str]) -> None:
    """Refuse a variable that a template does not read, or that its model sets; `read` may be a stranger's words.

    Raises:
        InvalidRequest: there is one; the message lists those that the template reads.
    """
    free = sorted(name for name in read if _NAME.fullmatch(name) and name not in OURS and name not in set_by_model)
    for name in variables:
        if name not in free:
            listed = ", ".join(free[:_MAX_LISTED]) + (", ..." if len(free) > _MAX_LISTED else "")
            others = f"it reads {listed}" if free else "it reads nothing but the messages"
            raise InvalidRequest(f"The model's chat template does not read {name}; {others}.", param=name)
