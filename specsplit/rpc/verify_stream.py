"""Streaming verification on the wire, at client and server. Knows no engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from specsplit.core.cancellation import to_its_end
from specsplit.core.errors import DeadlineExceeded, InvalidRequest, SpecSplitError, WorkerFailed
from specsplit.core.ports import Verifier, VerifyStream
from specsplit.core.types import Proposal, Turn, Verdict
from specsplit.rpc import calls, codec
from specsplit.rpc.channel import WorkerChannel
from specsplit.rpc.duplex import DuplexStream
from specsplit.rpc.pb import target_pb2
from specsplit.telemetry import spans

_FINISH = target_pb2.VerifyStreamResponse(finish=target_pb2.Finish()).SerializeToString()


async def serve_stream(
    verifier: Verifier, requests: AsyncIterator[bytes], check_open: Callable[[Turn], None]
) -> AsyncGenerator[bytes]:
    """Yield the commits of one stream; if it is broken off, free its session's slot.

    `check_open` raises for a new session while the worker drains.

    Raises:
        InvalidRequest: a message is not valid.
        SpecSplitError: the verifier raised it.
    """
    opening = await anext(requests, None)
    if opening is None:
        raise InvalidRequest("A stream begins with Open.")
    turn, limits = calls.decode_open(calls.parse(target_pb2.VerifyStreamRequest, opening))
    check_open(turn)
    stream = verifier.open_stream(turn, limits)
    # Both may hold a whole prompt, and this frame lives as long as the stream.
    del turn, opening
    failures: list[Exception] = []
    reader = asyncio.create_task(_read_all(requests, stream, failures), name="specsplit-verify-stream-reader")
    is_broken = True
    try:
        while (verdict := await stream.next_commit()) is not None:
            yield calls.encode_commit(verdict, spans.current_span_id()).SerializeToString()
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
        await to_its_end(_closed(stream, reader, keeps_slot=not is_broken))


async def _closed(stream: VerifyStream, reader: asyncio.Task[None], *, keeps_slot: bool) -> None:
    await asyncio.wait({reader})
    await stream.close(keeps_slot=keeps_slot)


async def _read_all(requests: AsyncIterator[bytes], stream: VerifyStream, failures: list[Exception]) -> None:
    """Pass proposals to the stream until the client cancels or sends an invalid message; both end it in order."""
    # Messages that end without a Cancel mean a lost client, which may be seen here before anywhere else.
    is_broken = True
    try:
        async for data in requests:
            message = calls.parse(target_pb2.VerifyStreamRequest, data)
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
        self, channel: WorkerChannel, method: str, opening: bytes, peer: str, max_waiting: int, timeout_s: float
    ) -> None:
        self._peer, self._max_waiting, self._timeout_s = peer, max_waiting, timeout_s
        self._incoming: deque[bytes] = deque()
        self._has_incoming = asyncio.Event()
        self._stream = DuplexStream(channel.duplex(method), self._take, "specsplit-verify-stream")
        self._stream.when_over(self._has_incoming.set)
        self._stream.send(opening)
        self._sent_bytes = len(opening)
        """Bytes sent since the last commit."""

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        """Send nodes without waiting; raises InvalidRequest for a value that no message can carry."""
        data = calls.encode_propose(proposal, is_more_coming=is_more_coming).SerializeToString()
        self._sent_bytes += len(data)
        self._stream.send(data)

    @property
    def is_ready(self) -> bool:
        """Whether a commit or the end of the stream has arrived."""
        return bool(self._incoming) or self._stream.is_over

    async def next_commit(self) -> Verdict | None:
        """Return the next commit; raises the target's error, or LinkError, also after `timeout_s` without a commit."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._incoming:
                    if self._stream.is_over:
                        self._stream.check()
                        return None
                    self._has_incoming.clear()
                    await self._has_incoming.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._peer} gave no answer for {self._timeout_s:g} s.") from None
        data = self._incoming.popleft()
        sent, self._sent_bytes = self._sent_bytes, 0
        try:
            message = calls.parse(target_pb2.VerifyStreamResponse, data)
            if message.WhichOneof("body") != "commit":
                return None
            commit = message.commit
            timings = codec.decode_telemetry(commit.telemetry, sent_bytes=sent, received_bytes=len(data))
            return calls.decode_commit(commit, timings)
        except InvalidRequest as error:
            raise WorkerFailed(f"{self._peer} gave a malformed answer: {error}") from error

    async def close(self, *, keeps_slot: bool = False) -> None:
        """End the stream in order; if the target does not end it in time, break it off, which frees the slot."""
        cancel = target_pb2.Cancel(frees_slot=not keeps_slot)
        await self._stream.close(target_pb2.VerifyStreamRequest(cancel=cancel).SerializeToString())

    def _take(self, data: bytes) -> None:
        # The limits of the stream bound what an honest target sends; memory must not depend on its honesty.
        self._incoming.append(data)
        if len(self._incoming) > self._max_waiting:
            raise WorkerFailed(f"{self._peer} commits further ahead than it was allowed to.")
        self._has_incoming.set()
