"""The log of a process that was started here: its lines of JSON go on in this process's log as they are."""

from __future__ import annotations

import json
import logging
from typing import Any, NoReturn, cast

PASSED_ON = "passed_on"
"""The attribute of a record with the fields of a line that another process has written."""
FAILED = "failed"
"""The event of the line that says why a process ends."""
_log = logging.getLogger(__name__)


def json_fields(text: str) -> dict[str, Any] | None:
    """Return the fields of a line of a log in JSON, None if it is no such line."""
    if not text.startswith("{"):
        return None
    try:
        fields = cast(object, json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    fields = cast("dict[str, Any]", fields)
    return fields if isinstance(fields.get("message"), str) and isinstance(fields.get("level"), str) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def pass_on(name: str, fields: dict[str, Any]) -> None:
    """Log a line of the process `name` at its own level, with the name as its field `process`.

    The level that was chosen for this process's own lines does not matter: the other process was given one.
    """
    outer = f"{name}: {fields['process']}" if "process" in fields else name
    level = logging.getLevelNamesMapping().get(fields["level"].upper(), logging.INFO)
    extra = {PASSED_ON: {**fields, "process": outer}}
    record = _log.makeRecord(_log.name, level, __file__, 0, "%s: %s", (name, fields["message"]), None, extra=extra)
    _log.handle(record)
