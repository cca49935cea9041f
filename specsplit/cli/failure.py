"""Says that a command failed: as a sentence for people, or as a line of JSON if the command's log is JSON."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Sequence

import typer

from specsplit.cli.logs import JsonFormatter, is_debugging, json_formatter
from specsplit.core.defaults import ENV_CONFIG, ENV_PREFIX
from specsplit.core.paths import expanded
from specsplit.rpc.child_log import FAILED

_ROLES = {"serve": "gateway", "lmtp": "gateway", "target": "target", "draft": "draft", "stage": "stage"}
"""Roles of the commands that have a log."""
_log = logging.getLogger(__name__)


def fail(error: BaseException, message: str, code: int, arguments: Sequence[str]) -> int:
    """Print one sentence about the failure of the command line `arguments`, and return its exit code."""
    shown = error if is_debugging() else None
    formatter = json_formatter() or _chosen_formatter(arguments)
    if formatter is not None:
        exception = (type(shown), shown, shown.__traceback__) if shown is not None else None
        ids = {"event": FAILED}
        record = _log.makeRecord(_log.name, logging.ERROR, __file__, 0, "%s", (message,), exception, extra=ids)
        typer.echo(formatter.format(record), err=True)
        return code
    if shown is not None:
        traceback.print_exception(shown)
    typer.echo(f"Error: {message}", err=True)
    return code


def _chosen_formatter(arguments: Sequence[str]) -> JsonFormatter | None:
    """Return the format of a log that has not begun, if JSON is chosen for it; the settings may be what is wrong."""
    role = _ROLES.get(next(iter(arguments), ""))
    if role is None:
        return None
    environment = os.environ.get(f"{ENV_PREFIX}{role.upper()}_LOG_FORMAT")
    chosen = _value(arguments, "--log-format") or environment or _in_file(arguments, role)
    return JsonFormatter(role) if chosen == "json" else None


def _value(arguments: Sequence[str], option: str) -> str | None:
    """Return the last value of an option on a command line, None if it has none."""
    found = None
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, joined = word.partition("=")
        if name == option:
            found = joined or after
    return found


def _in_file(arguments: Sequence[str], role: str) -> object:
    """Return what the settings file says of the log's format, None if it says nothing or cannot be read."""
    path = _value(arguments, "--config") or os.environ.get(ENV_CONFIG)
    if not path:
        return None
    import tomllib

    try:
        return tomllib.loads(expanded(path).read_text(encoding="utf-8-sig"))[role]["log_format"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
