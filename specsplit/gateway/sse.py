"""Answers that end when their client leaves: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specsplit.core.progress import Progress, listening
from specsplit.engine.cancellation import to_its_end
from specsplit.gateway.errors import SERVER_ERROR, ApiError, api_error
from specsplit.orchestrator.progress_words import progress_sentence
from specsplit.telemetry.session_log import log_request

T = TypeVar("T")
QUIET_S = 1.0
"""A stream that has nothing to send for so long sends a comment, so that nobody takes it for dead."""
_LAST_WORD_S = 1.0
"""Time for a client to take the error that ends its answer."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep the events until it has many
]
_REFUSED = frozenset({401, 403, 413, 429, 503})
"""Statuses of requests that are sent away: for want of a key or of room, or since they are too large."""
Event = dict[str, Any]
# Made once: json.dumps makes one for every value.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LINE_ENDS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}
"""Characters that end a line in Unicode, and so to clients that split what they read with `str.splitlines` (httpx)."""
_log = logging.getLogger(__name__)


def _to_json(event: Event) -> str:
    """Return an event as JSON on one line."""
    text = _encode(event)
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():
            text = text.replace(character, escaped)
    return text


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled if the client leaves before.

    Raises:
        ApiError: the client has left.
    """
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "The client has gone.")
    finally:
        leaving.cancel()
        task.cancel()
        await to_its_end(asyncio.wait({task, leaving}))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams `events`, and a comment while there are none; an error before the first of them is an ordinary answer."""

    def __init__(self, events: AsyncGenerator[Event]) -> None:
        super().__init__()
        self._events = events
        self._progress: Progress | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that has left gets no answer.
        with suppress(ApiError):
            await until_disconnect(receive, self._stream(scope, receive, _Writer(send)))

    async def _stream(self, scope: Scope, receive: Receive, writer: _Writer) -> None:
        commenting, last = asyncio.create_task(self._comment(writer)), "[DONE]"
        try:
            with listening(self._note):
                async with aclosing(self._events) as events:
                    async for event in events:
                        self._progress = None  # what was waited for has come
                        await writer.write(f"data: {_to_json(event)}\n\n")
        except Exception as caught:  # noqa: BLE001 - whatever it was, the client is told
            error = api_error(caught)
            if error.status == 500:
                _log.error("an answer failed", exc_info=caught)
            if not writer.has_begun:
                commenting.cancel()
                await logged(error, scope)(scope, receive, writer.send)
                return
            logged(error, scope)
            last = _to_json(error.body())
        finally:
            commenting.cancel()
        await writer.write(f"data: {last}\n\n", is_last=True)

    def _note(self, progress: Progress) -> None:
        self._progress = progress

    async def _comment(self, writer: _Writer) -> None:
        """Send comments in the pauses."""
        while True:
            num_written = writer.num_written
            await asyncio.sleep(QUIET_S)
            if writer.num_written == num_written:
                words = progress_sentence(self._progress) if self._progress is not None else "working"
                await writer.write(f": {words}\n\n")


class _Writer:
    """The body of a response, whose headers leave with the first part."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.num_written = 0

    @property
    def has_begun(self) -> bool:
        return self.num_written > 0

    async def write(self, text: str, *, is_last: bool = False) -> None:
        self.num_written += 1
        if self.num_written == 1:
            await self.send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self.send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})


def logged(error: ApiError, scope: Scope) -> Response:
    """Return an error as an answer; the log has a line if the request was refused or lost."""
    if error.status in _REFUSED or error.status >= 500:
        event = "refused" if error.status in _REFUSED else "lost"
        log_request(event, scope.get("state", {}).get("request_id", ""), error.status, error.code or error.type)
    return error_response(error)


async def end_early(sent: Message | None, scope: Scope, receive: Receive, send: Send) -> bool:
    """Tell the client of a request that is ended that the server shuts down; `sent` is the last message of its answer.

    Return False if the answer has come to a place where no word fits in.
    """
    if sent is not None and not sent.get("more_body"):
        return False
    ended = "The server is shutting down; ask again."
    error = ApiError(503, ended, SERVER_ERROR, code="server_shutting_down", headers={"retry-after": "1"})
    answer = logged(error, scope)
    with suppress(TimeoutError):  # it does not read
        async with asyncio.timeout(_LAST_WORD_S):
            if sent is None:
                await answer(scope, receive, send)
            else:
                await send({"type": "http.response.body", "body": f"data: {_to_json(error.body())}\n\n".encode()})
    return True


def error_response(error: ApiError) -> Response:
    """Return an error as an answer."""
    # In ASCII, since a message may quote half a character from the request.
    return Response(json.dumps(error.body()), error.status, dict(error.headers), media_type="application/json")
