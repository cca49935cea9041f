"""One client of LMTP, whatever carries its frames: its streams run side by side, each in order. Knows no socket."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

from specsplit.core.errors import InvalidRequest, SpecSplitError
from specsplit.core.progress import Progress, listening
from specsplit.gateway.errors import ApiError, api_error
from specsplit.gateway.lmtp import messages, streams
from specsplit.gateway.lmtp.message_log import MessageLog
from specsplit.gateway.lmtp.messages import Generate, Item, Score, Stream, UnknownCommand
from specsplit.gateway.lmtp.news import StreamNews
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.quotas import GatewayQuotas
from specsplit.limits import MAX_BODY_BYTES, MAX_LMTP_STREAMS, MAX_OPEN_CHARACTERS, SMALL_BYTES

_NUMBER = 16
"""Characters that a token id or a bias takes at most, as clients write them."""
_STREAM_ID = re.compile(r'"stream_id"\s*:\s*([0-9]{1,15})\b')
MAX_AT_ONCE = 64
"""Streams of one client that are with the workers at once; the others wait here for their turn."""
_LAST_WORD_S = 1.0
"""Time for a client to take the errors that end its streams."""
SHUTTING_DOWN = "The server is shutting down; ask again."
Send = Callable[[str], Awaitable[None]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LmtpServer:
    """The models, counters and log that all clients of LMTP share."""

    models: ModelTable
    metrics: Metrics = field(default_factory=Metrics)
    log: MessageLog | None = None
    quotas: GatewayQuotas = field(default_factory=GatewayQuotas)

    @property
    def max_frame(self) -> int:
        """Characters of a frame that some model could have a use for; reading a longer one would hold up all others."""
        known = [model.identity for model in self.models.served]
        numbers = max((identity.context + identity.vocab_size for identity in known), default=0)
        return max(MAX_BODY_BYTES, _NUMBER * numbers)


class LmtpSession:
    """Answers the frames of one client through `send`, which may wait until the client has taken them.

    `caller` is the name of its key; `name` tells it apart in the log of messages.
    """

    def __init__(self, server: LmtpServer, send: Send, caller: str = "", name: str = "") -> None:
        self._server, self._send, self._caller, self._name = server, send, caller, name
        self._open: dict[int, int] = {}
        """Streams whose last item has not been sent, and the characters of the frames that began them."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Those streams, and ended ones that have a slot to free yet."""
        self._sending = asyncio.Lock()
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._news = StreamNews(self._tell_news)
        self._refusal: str | None = None
        """Why no new stream is taken."""

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._open)

    async def handle(self, frame: str) -> None:
        """Begin what a frame asks for. What is wrong with it is answered, and never raised."""
        if len(frame) > (most := self._server.max_frame):
            await self.refuse(f"A frame for these models has at most {most} bytes.", _stream_named(frame))
            return
        is_small = len(frame) <= SMALL_BYTES
        try:
            # On a thread: a megabyte takes a tenth of a second, in which every other answer would stand still.
            command, stream_id, asked = self._read(frame) if is_small else await asyncio.to_thread(self._read, frame)
        except InvalidRequest as error:
            await self.refuse(str(error), error.stream_id if isinstance(error, UnknownCommand) else None)
            return
        if command == "MODEL_INFO":
            await self._describe(stream_id, asked)
            return
        try:
            if isinstance(asked, InvalidRequest):
                raise asked
            self._check_room(stream_id, len(frame))
        except InvalidRequest as error:
            await self._answer("TOKEN", messages.error_item(stream_id, str(error)))
            return
        self._open[stream_id] = len(frame)
        task = asyncio.create_task(self._run(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _read(self, frame: str) -> tuple[str, int, Stream | InvalidRequest]:
        """Log a frame, and return its command, its stream, and what it asks for or what is wrong with that.

        Raises:
            InvalidRequest: it is no request of any stream.
        """
        log = self._server.log
        try:
            command, fields = messages.split_frame(frame)
        except InvalidRequest:
            if log is not None:
                log.received(self._name, frame, None)
            raise
        if log is not None:
            log.received(self._name, frame, (command, fields))
        stream_id = messages.stream_id_of(fields)
        if stream_id is None:
            raise InvalidRequest(f"{command} needs a whole number as stream_id.")
        try:
            return command, stream_id, messages.parse(command, fields)
        except InvalidRequest as error:
            return command, stream_id, error

    async def refuse(self, sentence: str, stream_id: int | None = None) -> None:
        """Answer what is no request of any stream, though it may name one."""
        await self._answer("MSG", messages.error_item(stream_id, sentence))

    async def wait(self) -> None:
        """Wait until all streams have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def refuse_streams(self, reason: str) -> None:
        """Take no new stream from now on; each is answered with the reason."""
        self._refusal = reason

    async def close(self, reason: str | None = None) -> None:
        """End all streams; with a reason each ends with an error that says it, if the client still reads."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._news.close()
        if reason is not None and self._open:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await self._answer("TOKEN", *(messages.error_item(each, reason) for each in sorted(self._open)))
        self._open.clear()

    def _check_room(self, stream_id: int, num_characters: int) -> None:
        if self._refusal is not None:
            raise InvalidRequest(self._refusal)
        if stream_id in self._open:
            raise InvalidRequest(f"Stream {stream_id} is open already; choose another stream_id.")
        if len(self._open) >= MAX_LMTP_STREAMS:
            raise InvalidRequest(f"{MAX_LMTP_STREAMS} streams are open already; wait until one has ended.")
        if self._open and sum(self._open.values()) + num_characters > MAX_OPEN_CHARACTERS:
            sentence = f"The requests of open streams have {MAX_OPEN_CHARACTERS} characters together at most"
            raise InvalidRequest(f"{sentence}; wait until one has ended.")

    async def _describe(self, stream_id: int, asked: Stream | InvalidRequest) -> None:
        """Answer MODEL_INFO, for which no worker is asked: the real client waits for 5 s only."""
        try:
            if isinstance(asked, InvalidRequest):
                raise asked
            model = self._server.models.find(asked.model)
        except (ApiError, SpecSplitError) as error:
            await self._answer("MSG", messages.error_item(stream_id, api_error(error).message))
        else:
            await self._answer("MSG", messages.info_item(stream_id, model.name, model.identity))

    async def _run(self, asked: Stream) -> None:
        """Run one stream to its end; an error is its last item."""
        stream_id = asked.stream_id
        try:
            model = self._server.models.find(asked.model)
            if not model.is_ready:
                self._news.put(messages.status_item(stream_id, "loading", model=model.name))
            elif self._turns.locked():
                self._news.put(messages.status_item(stream_id, "queued"))
            with listening(lambda progress: self._note(stream_id, progress)):
                async with self._turns, aclosing(self._items(model, asked)) as rounds:
                    async for items in rounds:
                        self._news.drop(stream_id)
                        await self._send_items(stream_id, items)
        except Exception as error:  # noqa: BLE001 - the reader is told, and the other streams go on
            answer = api_error(error)
            if answer.status == 500:
                _log.error("a stream failed", exc_info=error)
            await self._send_items(stream_id, [messages.error_item(stream_id, answer.message)])
        finally:
            self._news.drop(stream_id)

    def _items(self, model: ServedModel, asked: Stream) -> AsyncGenerator[list[Item]]:
        def tell_full() -> None:
            self._news.put(messages.status_item(asked.stream_id, "queued"))

        # Without keys a caller is its host; a process on pipes has one client.
        answering = partial(self._server.quotas.answering, self._caller or self._name.rpartition(":")[0])
        if isinstance(asked, Generate):
            metrics = self._server.metrics
            return streams.generate(model, asked, self._caller, metrics, tell_full, answering)
        assert isinstance(asked, Score), "the other kind of stream"
        return streams.score(model, asked, self._caller, tell_full, answering)

    def _note(self, stream_id: int, progress: Progress) -> None:
        # A worker may report once more after the stream's end.
        if stream_id in self._open:
            self._news.put(messages.progress_item(stream_id, progress))

    async def _tell_news(self, take: Callable[[], list[Item]]) -> None:
        async with self._sending:
            if items := take():
                await self._write("SYS", items)

    async def _send_items(self, stream_id: int, items: Sequence[Item]) -> None:
        """Send items of a stream; whoever has read its last one may use its number again."""
        # The number is free just before the frame leaves: freed later, a quick client would be refused its next
        # stream, and freed earlier, two streams of one number could interleave.
        is_end = messages.is_last(items[-1])
        async with self._sending:
            num_characters = self._open.pop(stream_id, 0) if is_end else 0
            try:
                await self._write("TOKEN", items)
            except asyncio.CancelledError:
                if is_end:
                    self._open[stream_id] = num_characters  # not sent, so it ends as all that are open
                raise

    async def _answer(self, kind: str, *items: Item) -> None:
        # One frame at a time: a reader that has stopped holds up its own streams and nobody else's.
        async with self._sending:
            await self._write(kind, items)

    async def _write(self, kind: str, items: Sequence[Item]) -> None:
        if self._server.log is not None:
            self._server.log.sent(self._name, kind, items)
        await self._send(messages.frame(kind, items))


def _stream_named(frame: str) -> int | None:
    found = _STREAM_ID.search(frame[:SMALL_BYTES])
    return int(found[1]) if found is not None else None
