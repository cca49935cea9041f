"""The log of LMTP's messages: one frame a line, as it was sent, without the prompts unless the operator wants them.

2026-11-24T09:30:00.125Z 127.0.0.1:40212 > GENERATE {"model": "embedded", "prompt": "3 tokens", "stream_id": 1}
2026-11-24T09:30:00.190Z 127.0.0.1:40212 < TOKEN [{"token": 198, "stream_id": 1, "logprob": -0.2, ...}]
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO, cast

from specsplit.core.errors import InvalidSettings
from specsplit.core.paths import expanded
from specsplit.gateway.lmtp.messages import COMMANDS, Item

_MAX_WAITING = 10_000
"""Lines that wait for a slow disk; what comes beyond them is counted only."""
_LONGEST_NAME = 40
"""Characters that are shown of a field's name."""
_log = logging.getLogger(__name__)


class MessageLog:
    """Writes lines on a thread of its own, so that no answer waits for a disk."""

    def __init__(self, file: TextIO, *, shows_prompts: bool) -> None:
        self._file, self._shows_prompts = file, shows_prompts
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._num_missing = 0
        self._putting = threading.Lock()
        self._thread = threading.Thread(target=self._write_all, name="specsplit-messages", daemon=True)
        self._thread.start()

    def received(self, client: str, frame: str, request: tuple[str, Mapping[str, Any]] | None) -> None:
        """Log a frame of a client, which is that request, on any thread.

        If it is no request, only the first word is shown, for the rest may be a prompt.
        """
        if request is None:
            shown = frame if self._shows_prompts else f"{frame.partition(' ')[0][:40]!r} and so on: no request"
            self._put(client, ">", json.dumps(shown))
        else:
            kind, fields = request
            self._put(client, ">", f"{kind} {_json(fields if self._shows_prompts else _masked(kind, fields))}")

    def sent(self, client: str, kind: str, items: Sequence[Item]) -> None:
        """Log the items of a frame to a client."""
        shown = items if self._shows_prompts else [_without_scored(item) for item in items]
        self._put(client, "<", f"{kind} {_json(shown)}")

    def close(self) -> None:
        """Write what waits."""
        self._lines.put(None)
        self._thread.join()

    def _put(self, client: str, direction: str, message: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        with self._putting:
            missing = f"{now}Z {self._num_missing} messages are missing here\n" if self._num_missing else ""
            try:
                # On the event loop, so this never waits: a line for which there is no place is counted instead.
                self._lines.put_nowait(f"{missing}{now}Z {client or '-'} {direction} {message}\n")
            except queue.Full:
                self._num_missing += 1
            else:
                self._num_missing = 0

    def _write_all(self) -> None:
        is_well = True
        while (line := self._lines.get()) is not None:
            try:
                if is_well:
                    self._file.write(line)
                    if self._lines.empty():
                        self._file.flush()
            except OSError as error:
                is_well = False  # the service goes on without its log
                _log.error("the log of messages cannot be written any more (%s)", error.strerror)


@contextmanager
def message_log(path: str | None, *, shows_prompts: bool) -> Generator[MessageLog | None]:
    """Log to the end of a file for the length of the block; None logs nothing. Only its owner may read a new file.

    Raises:
        InvalidSettings: the file cannot be written, or prompts are to be in no log.
    """
    if path is None:
        if shows_prompts:
            raise InvalidSettings("--log-prompts needs a log for them: name it with --log-messages FILE.")
        yield None
        return
    try:
        file = open(  # noqa: SIM115 - closed below, and pathlib knows no opener
            expanded(path), "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)
        )
    except OSError as error:
        raise InvalidSettings(
            f"The file of --log-messages {path} cannot be written ({error.strerror}); name another one."
        ) from error
    with file:
        log = MessageLog(file, shows_prompts=shows_prompts)
        try:
            yield log
        finally:
            log.close()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True)


def _masked(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request without the contents of its prompt, which may be in a field that we do not know.

    A name that we do not know is cut, since a client might put anything there.
    """
    known = COMMANDS[kind].model_fields
    masked: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("prompt", "scored"):
            masked[name] = _size(value)
        elif name in known:
            masked[name] = value
        else:
            masked[name[:_LONGEST_NAME]] = f"{len(_json(value))} characters of JSON"
    return masked


def _size(value: object) -> str:
    if isinstance(value, str):
        return f"{len(value)} characters"
    if isinstance(value, list):
        return f"{len(cast('list[object]', value))} tokens"
    return "no prompt"


def _without_scored(item: Item) -> Item:
    """Return an item without what the client had sent itself: the tokens of a SCORE, which lack `top_logprobs`."""
    if "token" not in item or "top_logprobs" in item:
        return item
    return {name: value for name, value in item.items() if name not in ("token", "text")}
