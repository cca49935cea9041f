"""The frame around every call on a server: who calls, exception boundary, time limit, drain, trace. Knows no message.

The client's part (deadline, trace context) is in `channel`, since an interceptor there would cost a task a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar, cast

import grpc
from google.rpc.status_pb2 import Status

from specsplit.core.errors import AccessDenied, DeadlineExceeded, NoFreeSlot, SpecSplitError, WorkerUnreachable
from specsplit.rpc.auth import Guard, current_peer
from specsplit.rpc.budget import ByteBudget
from specsplit.rpc.client_sessions import serving_connection
from specsplit.rpc.rounds import ServedRounds
from specsplit.rpc.shares import StreamShare
from specsplit.rpc.status import of_call, status_of
from specsplit.telemetry import spans

OUR_SERVICES = "/specsplit."
_log = logging.getLogger(__name__)

T = TypeVar("T")
Metadata = Iterable[tuple[str, str | bytes]]
Context = grpc.aio.ServicerContext[bytes, bytes]


_OF_ROUNDS = {
    "/specsplit.v1.DraftService/Rounds": "GenerateDrafts",
    "/specsplit.v1.TargetService/Rounds": "VerifyDrafts",
}
"""Streams of rounds, and the call that each of their messages stands for."""
ANSWERS = frozenset({"VerifyDrafts", "VerifyStream", "Score", "GetTokenizer"})
"""Methods whose calls lose an answer if a drain cuts them; without a proposal of the draft a text goes on."""
SESSION_METHODS = frozenset({"GenerateDrafts", "VerifyDrafts", "VerifyStream", "EndSession", "Stats"})
"""Methods that a draining worker still answers: those of its open sessions, and what shows how many are left."""


def draining() -> WorkerUnreachable:
    """Return the error for a new session or call at a draining worker."""
    return WorkerUnreachable("The worker is shutting down and takes nothing new.")


class Boundary(grpc.aio.ServerInterceptor):
    """Runs each call of our services; health and reflection pass through once the guard has admitted their caller."""

    def __init__(self, max_call_s: float, budget: ByteBudget | None = None, guard: Guard | None = None) -> None:
        self._max_call_s = max_call_s
        self._budget = budget or ByteBudget()
        self._guard = guard or Guard(is_secure=False)
        self._streams = StreamShare()
        self._answered: frozenset[str] | None = None
        """Methods that are not refused while the server drains; None while it does not drain."""
        self._num_running = 0
        self.num_answers = 0
        """Calls under way that somebody waits for the answer of: those of ANSWERS."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending_rounds = asyncio.Event()

    @property
    def num_running(self) -> int:
        return self._num_running

    def refuse(self, answered: frozenset[str] = SESSION_METHODS) -> None:
        """Refuse new calls from now on, except those of the methods `answered`; running calls go on."""
        self._answered = answered

    def end_rounds(self) -> None:
        """End every stream of rounds when the rounds it has read are answered."""
        self._ending_rounds.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call runs, at most `timeout_s`; return False if the time was over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        if not method.startswith(OUR_SERVICES):
            return self._guarded(handler, method)
        metadata: Metadata = cast(Any, handler_call_details).invocation_metadata or ()
        if method in _OF_ROUNDS:
            one = cast(Callable[[bytes], Awaitable[bytes]], handler.stream_stream)
            return cast(Any, grpc.stream_stream_rpc_method_handler)(partial(self._serve_rounds, one, method))
        if handler.request_streaming:
            duplex = cast(Callable[[AsyncIterator[bytes], Context], AsyncGenerator[bytes]], handler.stream_stream)

            async def serve_duplex(requests: AsyncIterator[bytes], context: Context) -> None:
                metered = _Metered(requests, self._budget)
                write_all = partial(self._write_all, lambda: duplex(metered, context), context)
                try:
                    await self._run(write_all, 0, method, metadata, context, limit_s=None)
                finally:
                    metered.give_back()

            return cast(Any, grpc.stream_stream_rpc_method_handler)(serve_duplex)
        if handler.response_streaming:
            stream = cast(Callable[[bytes, Context], AsyncGenerator[bytes]], handler.unary_stream)

            async def serve_stream(request: bytes, context: Context) -> None:
                write_all = partial(self._write_all, lambda: stream(request, context), context)
                await self._run(write_all, len(request), method, metadata, context, self._max_call_s)

            return cast(Any, grpc.unary_stream_rpc_method_handler)(serve_stream)
        unary = cast(Callable[[bytes, Context], Awaitable[bytes]], handler.unary_unary)

        async def serve_unary(request: bytes, context: Context) -> bytes:
            serve = partial(unary, request, context)
            return await self._run(serve, len(request), method, metadata, context, self._max_call_s)

        return cast(Any, grpc.unary_unary_rpc_method_handler)(serve_unary)

    async def _admit(self, context: Context, method: str) -> None:
        """End the call with its status if its caller may not make it."""
        try:
            self._guard.admit(context, method)
        except AccessDenied as error:
            _log.warning("refused a call from %s: %s", context.peer(), error)
            await context.abort_with_status(of_call(status_of(error)))

    def _guarded(self, handler: grpc.RpcMethodHandler[Any, Any], method: str) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap the handler of a service that is none of ours."""
        inner: Any = handler
        kind = f"{'stream' if inner.request_streaming else 'unary'}_{'stream' if inner.response_streaming else 'unary'}"
        serve = getattr(inner, kind)

        async def answer(request: Any, context: Context) -> Any:
            await self._admit(context, method)
            return await serve(request, context)

        async def answer_all(request: Any, context: Context) -> None:
            await self._admit(context, method)
            try:
                await self._write_all(lambda: serve(request, context), context)
            except NoFreeSlot as error:
                await context.abort_with_status(of_call(status_of(error)))

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        coders = {"request_deserializer": inner.request_deserializer, "response_serializer": inner.response_serializer}
        return make(answer_all if inner.response_streaming else answer, **coders)

    async def _serve_rounds(
        self,
        one: Callable[[bytes], Awaitable[bytes]],
        method: str,
        _: AsyncIterator[bytes],
        context: Context,
    ) -> None:
        """Serve a stream in which every message counts as a call; the stream itself does not."""

        async def read() -> bytes | None:
            data = cast(object, await context.read())
            # At the end grpc returns its EOF object.
            return data if isinstance(data, bytes) else None

        async def serve(request: bytes, trace: Metadata) -> bytes | Status:
            name = _OF_ROUNDS[method]
            return await self._counted(partial(one, request), len(request), name, trace, self._max_call_s)

        await self._admit(context, method)
        try:
            with self._streams.taken(current_peer().name), serving_connection() as connection:
                await ServedRounds(read, context.write, serve, connection.end).run(self._ending_rounds)
        except Exception as error:  # noqa: BLE001 - as in `_outcome`
            if not isinstance(error, SpecSplitError):
                _log.exception("%s failed", method)
            await context.abort_with_status(of_call(status_of(error)))

    async def _write_all(self, begin: Callable[[], AsyncGenerator[bytes]], context: Context) -> None:
        """Write what a stream yields, within its peer's share of streams."""
        with self._streams.taken(current_peer().name):
            async with aclosing(begin()) as responses:
                async for response in responses:
                    await context.write(response)

    async def _run(
        self,
        serve: Callable[[], Awaitable[T]],
        num_bytes: int,
        method: str,
        metadata: Metadata,
        context: Context,
        limit_s: float | None,
    ) -> T:
        """Run one call, whose error becomes its status; `limit_s` is None for a stream both ways."""
        await self._admit(context, method)
        # Such a stream lasts as long as its session, so no limit would be right for it.
        outcome = await self._counted(serve, num_bytes, method.rpartition("/")[2], metadata, limit_s)
        if isinstance(outcome, Status):
            return await context.abort_with_status(of_call(outcome))
        return outcome

    async def _counted(
        self, serve: Callable[[], Awaitable[T]], num_bytes: int, name: str, metadata: Metadata, limit_s: float | None
    ) -> T | Status:
        """Run one call or round within the budget of bytes and the time limit; count and trace it."""
        is_answer = name in ANSWERS
        self._num_running += 1
        self.num_answers += is_answer
        self._idle.clear()
        has_room = self._budget.take(num_bytes)
        try:
            return await self._outcome(serve, has_room, name, metadata, limit_s)
        finally:
            if has_room:
                self._budget.give_back(num_bytes)
            self._num_running -= 1
            self.num_answers -= is_answer
            if not self._num_running:
                self._idle.set()

    async def _outcome(
        self, serve: Callable[[], Awaitable[T]], has_room: bool, name: str, metadata: Metadata, limit_s: float | None
    ) -> T | Status:
        """Return the answer, or the status of the error."""
        # The error itself is not kept: its traceback holds frames, and these the decoded request.
        try:
            if self._answered is not None and name not in self._answered:
                raise draining()
            if not has_room:
                raise _no_room()
            with spans.span("rpc", parent=spans.extract(metadata), method=name):
                return await _in_time(serve, limit_s)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the peer gets a status
            if not isinstance(error, SpecSplitError):
                _log.exception("%s failed", name)
            return status_of(error)


def _no_room() -> NoFreeSlot:
    return NoFreeSlot("The worker has as many large requests in hand as it can take; try again in a moment.")


class _Metered:
    """The messages of one stream; its first one, which may hold a whole prompt, takes room until the stream ends."""

    def __init__(self, requests: AsyncIterator[bytes], budget: ByteBudget) -> None:
        self._requests, self._budget = requests, budget
        self._num_taken: int | None = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        data = await anext(self._requests)
        if self._num_taken is None:
            if not self._budget.take(len(data)):
                raise _no_room()
            self._num_taken = len(data)
        return data

    def give_back(self) -> None:
        if self._num_taken is not None:
            self._budget.give_back(self._num_taken)


async def _in_time(serve: Callable[[], Awaitable[T]], limit_s: float | None) -> T:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await serve()
    except TimeoutError as error:
        if not limit.expired():
            raise  # the worker's own
        raise DeadlineExceeded(f"The call took longer than the {limit_s:g} s a worker allows.") from error
