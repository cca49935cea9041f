"""A stage in its coordinator's own process: called as the others are, without a connection.

The first stage of a chain can be one. A token then takes one way less, and is handed from process to process once less.
Its calls run outside of the context of whoever makes them, as they would elsewhere: the chain may be restored for a
request, and the stage is not to mistake the request's peer for the coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextvars import Context
from dataclasses import dataclass
from typing import Any, cast

import grpc

from specsplit.core.errors import DeadlineExceeded, SpecSplitError, WorkerFailed, WorkerUnreachable
from specsplit.rpc.channel import Duplex, WorkerChannel
from specsplit.rpc.credentials import ON_LOOPBACK
from specsplit.stages.wire.peer import StagePeer

ADDRESS = "the target itself"
"""Stands where the others have addresses; nobody dials it."""
_NAME = "The target's own stage"


@dataclass(frozen=True, slots=True)
class _Called:
    """The details by which grpc finds a handler."""

    method: str
    invocation_metadata: tuple[()] = ()


class OwnStage(StagePeer):
    """The stage behind `handler`, the calls of a StageService of this event loop, which the caller closes."""

    def __init__(self, handler: grpc.GenericRpcHandler) -> None:
        self._handler = handler
        super().__init__(ADDRESS)
        self.name = _NAME

    def _dial(self) -> WorkerChannel:
        return OwnChannel(self._handler)


class OwnChannel(WorkerChannel):
    """The calls of a service of this process; an error that is none of ours is one of the stage, as elsewhere."""

    def __init__(self, handler: grpc.GenericRpcHandler) -> None:
        super().__init__("localhost:1", _NAME, "stage", ON_LOOPBACK)  # dials nothing
        self._handler = handler

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                answer = self._found(method).unary_unary(request, None)
                return await asyncio.create_task(answer, context=Context())
        except TimeoutError:
            raise DeadlineExceeded(f"{_NAME} did not answer within {timeout_s:g} s.") from None
        except SpecSplitError:
            raise
        except Exception as error:
            raise WorkerFailed(f"{_NAME} failed: {error}") from error

    async def stream(self, method: str, request: bytes, timeout_s: float) -> AsyncGenerator[bytes]:
        async with asyncio.timeout(timeout_s):
            async for answer in self._found(method).unary_stream(request, None):
                yield answer

    def duplex(self, method: str) -> Duplex:
        return _OwnCall(self._found(method), self)

    def _found(self, method: str) -> Any:
        return self._handler.service(cast(Any, _Called(method)))


class _OwnCall(Duplex):
    """A call that streams both ways within this process; the stage bounds the packets that it has at once."""

    def __init__(self, handler: Any, channel: WorkerChannel) -> None:
        self._channel = channel
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._answers: asyncio.Queue[bytes | SpecSplitError | None] = asyncio.Queue()
        answers = handler.stream_stream(self._arriving(), None)
        self._serving = asyncio.create_task(self._serve(answers), context=Context())

    async def write(self, data: bytes) -> None:
        if self._serving.done():
            raise self._channel.cut()
        self._requests.put_nowait(data)

    async def read(self) -> bytes | None:
        if self._serving.done() and self._answers.empty():
            raise self._channel.cut()
        answer = await self._answers.get()
        if isinstance(answer, SpecSplitError):
            raise answer
        return answer

    async def end(self) -> None:
        self._requests.put_nowait(None)

    def cancel(self) -> None:
        self._serving.cancel()

    async def _arriving(self) -> AsyncIterator[bytes]:
        while (data := await self._requests.get()) is not None:
            yield data

    async def _serve(self, answers: AsyncIterator[bytes]) -> None:
        try:
            async for answer in answers:
                self._answers.put_nowait(answer)
            self._answers.put_nowait(None)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the reader hears of it, as it would over a connection
            is_ours = isinstance(error, SpecSplitError)
            self._answers.put_nowait(error if is_ours else WorkerUnreachable(f"{_NAME} ended the stream: {error}"))
