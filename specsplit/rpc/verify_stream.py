"""Streaming verification on the wire, at client and server. Knows no engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, SpecSplitError, WorkerFailed
from specsplit.core.ports import Verifier, VerifyStream
from specsplit.core.progress import Progress, current_listener, listening
from specsplit.core.types import Proposal, Turn, Verdict
from specsplit.engine.cancellation import to_its_end
from specsplit.limits import OPEN_S, SMALL_BYTES
from specsplit.rpc import calls, codec, load
from specsplit.rpc.channel import WorkerChannel
from specsplit.rpc.checksum import parse_checked, with_crc
from specsplit.rpc.duplex import DuplexStream
from specsplit.rpc.pb import target_pb2
from specsplit.telemetry import spans

_VERIFY_STREAM = "/specsplit.v1.TargetService/VerifyStream"
_FINISH = with_crc(target_pb2.VerifyStreamResponse(finish=target_pb2.Finish()))


async def serve_stream(
    verifier: Verifier, requests: AsyncIterator[bytes], admit: Callable[[Turn], Turn]
) -> AsyncGenerator[bytes]:
    """Yield the commits of one stream; if it is broken off, free its session's slot.

    `admit` returns the turn to begin with, and raises for a session that may not be used.

    Raises:
        InvalidRequest: a message is not valid.
        SpecSplitError: the verifier raised it.
    """
    opening = await _first_message(requests)
    turn, limits = calls.decode_open(parse_checked(target_pb2.VerifyStreamRequest, opening))
    turn = admit(turn)
    reports = _Reports()
    with listening(reports.add):
        stream = verifier.open_stream(turn, limits)
    # Both may hold a whole prompt, and this frame lives as long as the stream.
    del turn, opening
    failures: list[Exception] = []
    reader = asyncio.create_task(_read_all(requests, stream, failures), name="specsplit-verify-stream-reader")
    first = asyncio.create_task(stream.next_commit(), name="specsplit-verify-stream-first")
    is_broken = True
    try:
        async with aclosing(reports.until(first)) as messages:
            async for message in messages:
                yield message
        verdict = await first
        while verdict is not None:
            yield with_crc(calls.encode_commit(verdict, spans.current_span_id()))
            verdict = await stream.next_commit()
        is_broken = False
        if failures:
            raise failures[0]
        yield _FINISH
    except SpecSplitError:
        # The client gets the error in order, so its session may go on in the same slot.
        is_broken = False
        raise
    finally:
        reader.cancel()
        first.cancel()
        await to_its_end(_closed(stream, {reader, first}, keeps_slot=not is_broken))


async def _first_message(requests: AsyncIterator[bytes]) -> bytes:
    try:
        async with asyncio.timeout(OPEN_S):
            opening = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"The stream opened no session within {OPEN_S:g} s.") from None
    if opening is None:
        raise InvalidRequest("A stream begins with Open.")
    return opening


class _Reports:
    """Progress of a stream that waits for its first commit; only the latest one is worth sending."""

    def __init__(self) -> None:
        self._latest: Progress | None = None
        self._has_news = asyncio.Event()

    def add(self, progress: Progress) -> None:
        self._latest = progress
        self._has_news.set()

    async def until(self, first: asyncio.Task[Verdict | None]) -> AsyncGenerator[bytes]:
        """Yield messages of progress until the first commit is there."""
        first.add_done_callback(lambda _: self._has_news.set())
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if first.done():
                return
            assert self._latest is not None, "only a report or the first commit is news"
            progress = load.encode_progress(self._latest)
            yield with_crc(target_pb2.VerifyStreamResponse(progress=progress))


async def _closed(stream: VerifyStream, tasks: set[asyncio.Task[Any]], *, keeps_slot: bool) -> None:
    await asyncio.wait(tasks)
    await stream.close(keeps_slot=keeps_slot)


async def _read_all(requests: AsyncIterator[bytes], stream: VerifyStream, failures: list[Exception]) -> None:
    """Pass proposals to the stream until the client cancels or sends an invalid message; both end it in order."""
    # Messages that end without a Cancel mean a lost client, which may be seen here before anywhere else.
    is_broken = True
    try:
        async for data in requests:
            # The largest tree takes less; what is larger would be parsed outside of the budget of bytes.
            codec.require(len(data) <= SMALL_BYTES, "propose", f"A Propose has at most {SMALL_BYTES} bytes.")
            message = parse_checked(target_pb2.VerifyStreamRequest, data)
            if message.WhichOneof("body") == "cancel":
                is_broken = message.cancel.frees_slot
                break
            if message.WhichOneof("body") != "propose":
                raise InvalidRequest("A stream goes on with Propose, and ends with Cancel.")
            tree = codec.decode_tree(message.propose.tree)
            stream.propose(tree, is_more_coming=message.propose.is_more_coming)
    except Exception as error:  # noqa: BLE001 - whatever it is, the call ends with it
        is_broken = False
        failures.append(error)
    await stream.close(keeps_slot=not is_broken)


class RemoteStream:
    """One session's stream to a target in another process; implements VerifyStream.

    At most `max_waiting` answers may wait to be read; waiting for one takes at most `timeout_s`.
    """

    def __init__(
        self, channel: WorkerChannel, opening: bytes, peer: str, max_waiting: int, timeout_s: float, vocab_size: int
    ) -> None:
        self._peer, self._max_waiting, self._timeout_s = peer, max_waiting, timeout_s
        self._vocab_size = vocab_size
        self._incoming: deque[bytes] = deque()
        self._wait = _Wait(timeout_s)
        own = channel.for_large(len(opening)) if len(opening) > SMALL_BYTES else None
        self._stream = DuplexStream((own or channel).duplex(_VERIFY_STREAM), self._take, "specsplit-verify-stream")
        self._stream.when_over(self._wait.end)
        if own is not None:
            self._stream.when_over(own.close_soon)
        self._stream.send(opening)
        self._listener = current_listener()
        self._has_commits = False
        self._sent_bytes = len(opening)
        """Bytes sent since the last commit."""

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        """Send nodes without waiting; raises InvalidRequest for a value that no message can carry."""
        data = with_crc(calls.encode_propose(proposal, is_more_coming=is_more_coming))
        self._sent_bytes += len(data)
        self._stream.send(data)

    @property
    def is_ready(self) -> bool:
        """Whether a commit or the end of the stream has arrived."""
        return bool(self._incoming) or self._stream.is_over

    async def next_commit(self) -> Verdict | None:
        """Return the next commit; raises the target's error, or LinkError, also after `timeout_s` without a commit."""
        while not self._incoming:
            if self._stream.is_over:
                self._stream.check()
                return None
            if not await self._wait.begin():
                raise DeadlineExceeded(f"{self._peer} gave no answer for {self._timeout_s:g} s.")
        data = self._incoming.popleft()
        sent, self._sent_bytes = self._sent_bytes, 0
        try:
            message = parse_checked(target_pb2.VerifyStreamResponse, data)
            if message.WhichOneof("body") != "commit":
                return None
            commit = message.commit
            timings = codec.decode_telemetry(commit.telemetry, sent_bytes=sent, received_bytes=len(data))
            return calls.decode_commit(commit, timings, self._vocab_size)
        except InvalidRequest as error:
            raise WorkerFailed(f"{self._peer} gave a malformed answer: {error}") from error

    async def close(self, *, keeps_slot: bool = False) -> None:
        """End the stream in order; if the target does not end it in time, break it off, which frees the slot."""
        self._wait.forget()
        cancel = target_pb2.Cancel(frees_slot=not keeps_slot)
        await self._stream.close(with_crc(target_pb2.VerifyStreamRequest(cancel=cancel)))

    def _take(self, data: bytes) -> None:
        if not self._has_commits and self._hears_progress(data):
            return
        self._has_commits = True
        # The limits of the stream bound what an honest target sends; memory must not depend on its honesty.
        self._incoming.append(data)
        if len(self._incoming) > self._max_waiting:
            raise WorkerFailed(f"{self._peer} commits further ahead than it was allowed to.")
        self._wait.end()

    def _hears_progress(self, data: bytes) -> bool:
        """Pass a message on if it is progress, and let the time limit count anew: the target is not silent."""
        try:
            message = parse_checked(target_pb2.VerifyStreamResponse, data)
        except (InvalidRequest, WorkerFailed):
            return False  # `next_commit` says so
        if message.WhichOneof("body") != "progress":
            return False
        self._wait.prolong()
        if self._listener is not None:
            self._listener(load.decode_progress(message.progress))
        return True


class _Wait:
    """The wait of a stream's reader, one at a time and of limited length; between two of them its timer may run on."""

    # A timer for each commit would cost more than the rest of the wait. When this one fires, it looks how long the wait
    # under way may still last, and moves there.

    def __init__(self, limit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s, self._end_s = limit_s, 0.0
        self._news: asyncio.Future[bool] | None = None
        """Done with False when the time is over; None while nobody waits."""
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self) -> bool:
        """Wait for `end`; return False if the time is over first."""
        self._news = self._loop.create_future()
        self.prolong()
        if self._timer is None:
            self._timer = self._loop.call_at(self._end_s, self._look)
        try:
            return await self._news
        finally:
            self._news = None

    def end(self) -> None:
        """Let the reader look, if it waits."""
        if self._news is not None and not self._news.done():
            self._news.set_result(True)

    def prolong(self) -> None:
        """Let the limit count from now."""
        self._end_s = self._loop.time() + self._limit_s

    def _look(self) -> None:
        self._timer = None
        if self._news is None or self._news.done():
            return
        if self._loop.time() < self._end_s:
            self._timer = self._loop.call_at(self._end_s, self._look)
        else:
            self._news.set_result(False)

    def forget(self) -> None:
        """Stop the timer, since nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
