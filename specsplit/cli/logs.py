"""Sends the package's log to stderr: as lines for people or as JSON, from the level that the user chose.

Without a choice a service logs what happens to sessions (INFO) and a command nothing, since it answers in words of its
own; SPECSPLIT_DEBUG=1 logs everything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from specsplit.core.defaults import ENV_DEBUG
from specsplit.rpc.child_log import PASSED_ON
from specsplit.telemetry import spans

if TYPE_CHECKING:
    from specsplit.core.sections import LoggedSettings

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_IDS = ("event", "session", "request")
"""Fields that a record may have beside its message."""
_notes = logging.getLogger("specsplit.notes")
_opentelemetry = logging.getLogger("opentelemetry")
_grpc = logging.getLogger("grpc._cython.cygrpc")


def is_debugging() -> bool:
    return os.environ.get(ENV_DEBUG, "0") not in ("", "0")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `role` is that of the process."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record; that of another process, which has its own role, goes on as it is."""
        if (passed_on := getattr(record, PASSED_ON, None)) is not None:
            return json.dumps(passed_on, ensure_ascii=False)
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "role": self._role,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= {name: value for name in _IDS if (value := getattr(record, name, ""))}
        if trace_id := spans.current_trace_id():
            line["trace_id"] = trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(settings: LoggedSettings | None = None, role: str = "") -> None:
    """Send the log of a service with these settings to stderr, and of a command, which has none, nowhere.

    A root logger that has a handler already keeps it.
    """
    package = logging.getLogger("specsplit")
    if settings is None and not is_debugging():
        if not package.handlers:
            package.addHandler(logging.NullHandler())
        if sys.stderr.isatty():  # warnings about a collector that is away would stand in the middle of an answer
            _opentelemetry.addHandler(logging.NullHandler())
        return
    logging.basicConfig(level=logging.INFO if is_debugging() else logging.WARNING, format=_FORMAT)
    _grpc.addFilter(_is_no_cancellation)
    if settings is None:
        return
    package.setLevel(logging.DEBUG if is_debugging() else settings.log_level.upper())
    if settings.log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter(role))
        logging.captureWarnings(capture=True)


def json_formatter() -> JsonFormatter | None:
    """Return the format of this process's log if it is JSON."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return next((each for each in formatters if isinstance(each, JsonFormatter)), None)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Tell whether a record is more than the traceback that gRPC writes of a call cancelled before its first step."""
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None:
        return True
    from asyncio import CancelledError

    return not issubclass(kind, CancelledError)


def note(text: str) -> None:
    """Show the operator of a service one sentence: as a line of the log in JSON, else as it is.

    A log that cannot be written ends no service: the sentence is lost, as a record of `logging` is.
    """
    if json_formatter() is not None:
        # Whatever the level, since these are the words that every service says.
        _notes.setLevel(logging.INFO)
        _notes.info("%s", text)
        return
    from specsplit.cli import render

    with contextlib.suppress(OSError):  # a full disk, a pipe that nobody reads any more, a terminal that is gone
        render.note(text)
