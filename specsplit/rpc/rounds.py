"""The rounds of all sessions of a connection over one stream, both ends. Knows neither turns nor trees.

A unary call costs a round twice as much as a message in an open stream (docs/adr/0009).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from google.rpc.status_pb2 import Status

from specsplit.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LinkError,
    NoFreeSlot,
    SpecSplitError,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.progress import Progress, current_listener, listening
from specsplit.engine.cancellation import to_its_end
from specsplit.limits import MAX_ROUNDS, SMALL_BYTES
from specsplit.rpc.channel import WorkerChannel
from specsplit.rpc.checksum import parse_checked, with_crc
from specsplit.rpc.duplex import DuplexStream
from specsplit.rpc.load import decode_progress, encode_progress
from specsplit.rpc.pb import common_pb2
from specsplit.rpc.status import error_said, status_of
from specsplit.telemetry import spans

_log = logging.getLogger(__name__)
_FLUSH_S = 1.0
"""Longest wait at the end of a stream for a client that reads its last answers slowly."""
_CLOSE_S = 0.2
"""Longest wait of a closing client for the worker to end its stream."""
_TRACE_BYTES = 4096
"""Bytes that trace context and envelope may add to a request."""
Trace = Iterable[tuple[str, str]]
Serve = Callable[[bytes, Trace], Awaitable[bytes | Status]]
"""Answers one round with the caller's trace context; a failure is returned as a status."""


class RoundsClient:
    """The rounds of one worker's sessions, over a stream that is opened when a round finds none.

    After a rotation to a certificate with another name rounds begin on a stream of that name, as all other calls do.
    """

    def __init__(self, channel: WorkerChannel, method: str, peer: str) -> None:
        self._channel, self._method, self._peer = channel, method, peer
        channel.on_renamed = self._leave
        self._stream: _RoundStream | None = None
        self._leaving: dict[asyncio.Task[None], _RoundStream] = {}
        """Streams of a large round or of an earlier identity, each with the task that ends it when all is answered."""
        self._is_closed = False

    async def call(self, request: bytes, timeout_s: float) -> tuple[bytes, int, int]:
        """Return the answer to one round, and the bytes of the messages sent and received.

        Cancelling the caller withdraws the round. A large one has a connection of its own, so none waits behind it.

        Raises:
            LinkError: the worker cannot be reached, is late, or failed.
            SpecSplitError: the worker answered with this error.
        """
        stream = self._stream
        if self._is_closed:
            raise self._channel.closed()
        if len(request) > SMALL_BYTES:
            channel = self._channel.for_large(len(request))
            stream = _RoundStream(channel, self._method, self._peer, is_shared=False)
            self._end_when_answered(stream, channel)
        elif stream is None or stream.is_over:
            stream = self._stream = _RoundStream(self._channel, self._method, self._peer)
        return await stream.call(request, timeout_s)

    async def aclose(self) -> None:
        """End the stream; rounds under way fail."""
        self._is_closed = True
        for stream in (self._stream, *self._leaving.values()):
            if stream is not None:
                await stream.aclose()
        if self._leaving:
            await asyncio.wait(set(self._leaving))

    def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._end_when_answered(stream)

    def _end_when_answered(self, stream: _RoundStream, channel: WorkerChannel | None = None) -> None:
        """End a stream once all is answered, and then the channel, if it has one of its own."""

        async def end() -> None:
            try:
                await stream.finish()
            finally:
                if channel is not None:
                    await channel.aclose()

        ending = asyncio.create_task(end(), name="specsplit-rounds-end")
        self._leaving[ending] = stream
        ending.add_done_callback(lambda task: self._leaving.pop(task, None))


class _RoundStream:
    """One stream at the client, from its opening to its end."""

    def __init__(self, channel: WorkerChannel, method: str, peer: str, *, is_shared: bool = True) -> None:
        self._channel, self._peer, self._is_shared = channel, peer, is_shared
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _Waiter] = {}
        """Callers by the id of the call."""
        self._last_id = 0
        self._stream = DuplexStream(channel.duplex(method), self._take, "specsplit-rounds")
        self._stream.when_over(self._end)

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    async def call(self, request: bytes, timeout_s: float) -> tuple[bytes, int, int]:
        self._last_id += 1
        call_id, waiter = self._last_id, _Waiter(self._loop, timeout_s, self._peer)
        call = common_pb2.RoundCall(id=call_id, request=request)
        if trace := spans.inject():
            call.trace.update(dict(trace))
        data = with_crc(call)
        self._waiting[call_id] = waiter
        self._stream.send(data)
        try:
            response, num_received = await waiter.answer
            return response, len(data), num_received
        finally:
            waiter.timer.cancel()
            # Still there, so no answer has come: the caller was cancelled or too late.
            if self._waiting.pop(call_id, None) is not None:
                self._withdraw(call_id, data)

    def _withdraw(self, call_id: int, data: bytes) -> None:
        if not self.is_over and not self._stream.take_back(data):
            withdrawn = common_pb2.RoundCall(id=call_id, withdraw=common_pb2.Withdraw())
            self._stream.send(with_crc(withdrawn))

    def _take(self, data: bytes) -> None:
        """Pass an answer to its caller, if that still waits."""
        try:
            answer = parse_checked(common_pb2.RoundAnswer, data)
        except InvalidRequest as error:
            raise WorkerFailed(f"{self._peer} gave a malformed answer: {error}") from error
        body = answer.WhichOneof("body")
        waiter = self._waiting.get(answer.id) if body == "progress" else self._waiting.pop(answer.id, None)
        if waiter is None or waiter.answer.done():
            return
        match body:
            case "response":
                waiter.answer.set_result((answer.response, len(data)))
            case "status":
                waiter.answer.set_exception(error_said(answer.status, self._peer))
            case "progress":
                waiter.hear(decode_progress(answer.progress))
            case None:
                waiter.answer.set_exception(WorkerFailed(f"{self._peer} gave an answer that says nothing."))

    def _end(self) -> None:
        """Fail the calls that still wait, since the stream has ended."""
        waiting, self._waiting = self._waiting, {}
        error = self._error()
        for waiter in waiting.values():
            if not waiter.answer.done():
                # An error each: raising one object in several tasks would mix their tracebacks.
                waiter.answer.set_exception(_twin(error))

    def _error(self) -> SpecSplitError:
        try:
            self._stream.check()
        except (LinkError, NoFreeSlot) as error:
            return error
        except Exception as error:  # noqa: BLE001 - a status for one message, or a mistake of ours
            if not self._is_shared and isinstance(error, SpecSplitError):
                return error
            return WorkerFailed(f"{self._peer} ended the stream of all rounds: {error}")
        except asyncio.CancelledError:
            pass
        return self._channel.cut()

    async def finish(self) -> None:
        """End the stream when the rounds under way are answered."""
        while self._waiting:
            await asyncio.wait([waiter.answer for waiter in self._waiting.values()])
        await self._stream.close()

    async def aclose(self) -> None:
        for waiter in self._waiting.values():
            if not waiter.answer.done():
                waiter.answer.set_exception(
                    WorkerUnreachable(f"{self._peer}: the connection was closed during the call.")
                )
        await self._stream.close(flush_s=_CLOSE_S)


def _twin(error: SpecSplitError) -> SpecSplitError:
    """Return another error that says the same."""
    # `copy.copy` would pass the sentence to a constructor that takes other arguments.
    twin = type(error).__new__(type(error), *error.args)
    vars(twin).update(vars(error))
    return twin


class _Waiter:
    """A caller of the client: the future of the response and the size of its message, and when it gives up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float, peer: str) -> None:
        self.answer: asyncio.Future[tuple[bytes, int]] = loop.create_future()
        self.timer = loop.call_later(timeout_s, self._expire)
        self._loop, self._timeout_s, self._peer = loop, timeout_s, peer
        self._listener = current_listener()

    def hear(self, progress: Progress) -> None:
        """Pass progress on; the time limit counts anew, since the worker is not silent."""
        self.timer.cancel()
        self.timer = self._loop.call_later(self._timeout_s, self._expire)
        if self._listener is not None:
            self._listener(progress)

    def _expire(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(DeadlineExceeded(f"{self._peer} gave no answer in time."))


class ServedRounds:
    """One stream at the server; each round is answered as soon as it is ready. `read` returns None at the end.

    `on_end` is called when there is no client any more, before the rounds under way have ended. The stream of a large
    round ends without it once that is answered: its client goes on over another stream.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[bytes | None]],
        write: Callable[[bytes], Awaitable[None]],
        serve: Serve,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._read, self._write, self._serve, self._on_end = read, write, serve, on_end
        self._under_way: dict[int, asyncio.Task[None]] = {}
        """Unanswered rounds, which may still be withdrawn."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Rounds and refusals, until their answers are written."""
        self._reporting: set[asyncio.Task[None]] = set()
        """Progress that is being written."""
        self._writing = asyncio.Lock()
        self._last_id = 0
        self._is_of_large_round = False
        """Whether the only round so far is a large one: its client ends the stream when it has the answer."""
        self._unsent: dict[int, Progress] = {}
        """The latest progress of a round that waits to be written."""

    async def run(self, ending: asyncio.Event) -> None:
        """Answer until the client or `ending` ends the stream.

        Raises:
            InvalidRequest: a message that makes no sense; every round under way ends with the stream.
        """
        reading, stopping = asyncio.create_task(self._read_all()), asyncio.create_task(ending.wait())
        is_client_there = False
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            # Rounds that have not been read go to another worker.
            reading.cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)
            is_client_there = self._is_of_large_round
        finally:
            if not is_client_there:
                self._on_end()
            await to_its_end(self._end({reading, stopping}))

    async def _end(self, own: set[asyncio.Task[Any]]) -> None:
        """Cancel the unanswered rounds and end the stream."""
        # grpc never ends a stream whose write was cancelled, so an answer that is being written leaves first.
        for task in own.union(self._under_way.values()):
            task.cancel()
        _, stuck = await asyncio.wait(own | self._tasks | self._reporting, timeout=_FLUSH_S)
        for task in stuck:
            task.cancel()
        if stuck:
            await asyncio.wait(stuck)

    async def _read_all(self) -> None:
        while (data := await self._read()) is not None:
            call = parse_checked(common_pb2.RoundCall, data)
            match call.WhichOneof("body"):
                case "request" if call.id > self._last_id:
                    self._begin(call, is_large=self._last_id > 0 and len(data) > SMALL_BYTES + _TRACE_BYTES)
                case "withdraw" if 0 < call.id <= self._last_id:
                    if call.id in self._under_way:
                        self._under_way[call.id].cancel()
                case _:
                    raise InvalidRequest("A stream of rounds takes requests, each with a new id, and withdraws them.")
            # From here the task of the round holds the request; this frame would keep it until the next message.
            del data, call
            # The round begins before the next message is asked for, which takes as long as to hand work to the device.
            await asyncio.sleep(0)
            # MAX_ROUNDS rounds may each report progress, and as many refusals be written; a client that reads none of
            # them is not read either.
            if len(self._tasks) + len(self._reporting) >= 3 * MAX_ROUNDS:
                await asyncio.wait(self._tasks | self._reporting, return_when=asyncio.FIRST_COMPLETED)

    def _begin(self, call: common_pb2.RoundCall, *, is_large: bool) -> None:
        self._is_of_large_round = self._last_id == 0 and len(call.request) > SMALL_BYTES
        self._last_id = call.id
        if is_large:
            self._refuse(call.id, InvalidRequest("The round is too large for this stream; open one for it."))
        elif len(self._tasks) >= MAX_ROUNDS:
            self._refuse(call.id, NoFreeSlot(f"The stream has {MAX_ROUNDS} rounds in hand; try again in a moment."))
        else:
            call_id = call.id
            work = self._answer(call_id, call.request, tuple(call.trace.items()))
            task = self._under_way[call_id] = _start(work, self._tasks)
            # A task withdrawn before its first step never comes to remove itself.
            task.add_done_callback(lambda _: self._under_way.pop(call_id, None))

    def _refuse(self, call_id: int, error: SpecSplitError) -> None:
        refusal = common_pb2.RoundAnswer(id=call_id, status=status_of(error).SerializeToString())
        _start(self._send(with_crc(refusal)), self._tasks)

    async def _answer(self, call_id: int, request: bytes, trace: Trace) -> None:
        try:
            with listening(partial(self._report, call_id)):
                outcome = await self._serve(request, trace)
        finally:
            # From here on the round cannot be withdrawn: a write must not be broken off.
            self._under_way.pop(call_id, None)
        # The budget has its bytes back, so the request itself may not stay while the answer is written.
        del request
        answer = common_pb2.RoundAnswer(id=call_id)
        if isinstance(outcome, bytes):
            answer.response = outcome
        else:
            answer.status = outcome.SerializeToString()
        await self._send(with_crc(answer))

    def _report(self, call_id: int, progress: Progress) -> None:
        """Send the progress of a round; if the client reads slowly, only the latest one."""
        is_waiting, self._unsent[call_id] = call_id in self._unsent, progress
        if not is_waiting:
            _start(self._send_progress(call_id), self._reporting)

    async def _send_progress(self, call_id: int) -> None:
        async with self._writing:
            progress = self._unsent.pop(call_id)
            if call_id not in self._under_way:
                return  # answered or withdrawn meanwhile
            with suppress(Exception):  # the client has gone, as in `_send`
                answer = common_pb2.RoundAnswer(id=call_id, progress=encode_progress(progress))
                await self._write(with_crc(answer))

    async def _send(self, data: bytes) -> None:
        try:
            # grpc takes one message at a time.
            async with self._writing:
                await self._write(data)
        except Exception:  # noqa: BLE001 - the client has gone, which the end of its messages tells
            _log.debug("an answer was not wanted any more", exc_info=True)


def _start(work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Return a task for the work, which stays in `tasks` until it has ended."""
    task = asyncio.create_task(work, name="specsplit-round")
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
