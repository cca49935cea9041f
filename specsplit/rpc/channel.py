"""One connection to one worker: sends and receives bytes, and turns every failure into an error of the tree.

Only here does a client use grpc: each call has a deadline, and trace context while spans are on. Knows no message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, NoReturn, cast
from weakref import WeakSet

import grpc

from specsplit.core.errors import SpecSplitError, WorkerClosed, WorkerFailed, WorkerUnreachable
from specsplit.limits import SMALL_BYTES
from specsplit.rpc.auth import LinkRole
from specsplit.rpc.credentials import Security
from specsplit.rpc.status import error_of
from specsplit.telemetry import spans

_RETIRED_S = 7 * 86400.0
"""Time for which calls begun before a rotation may go on over the connection that they have."""
_STATUS_S = 1.0
"""Time for the status of a call whose write has failed."""
_closing = set[asyncio.Task[None]]()
"""Channels that are being closed, which nobody waits for."""


class WorkerChannel:
    """A channel to a `role`, made with the first call on the loop of that call, and anew after a rotation.

    `peer` names the worker in errors.
    """

    def __init__(self, address: str, peer: str, role: LinkRole, security: Security, message_bytes: int = 0) -> None:
        """Name the other end; `message_bytes` are those of the one large message that it is for, if there is one.

        Raises:
            InvalidRequest: the address is malformed.
            InvalidSettings: the link would leave this machine in plaintext.
        """
        security.check_dial(address)
        self._address, self._peer, self._security = address, peer, security
        self._role: LinkRole = role
        self._message_bytes = message_bytes
        self._large = WeakSet[WorkerChannel]()
        """Those made for large messages."""
        self.on_renamed: Callable[[], None] = lambda: None
        """Called when calls begin under another identity than those before, which go on under theirs."""
        self._channel: grpc.aio.Channel | None = None
        self._shown = 0, ""
        """Version and identity of the certificate that the channel was made with."""
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        """Channels from before a rotation, each with the task that closes it when its calls have ended."""
        self._methods: dict[str, Any] = {}
        self._is_closed = False

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Return the answer to one unary call; cancelling the caller cancels the call.

        Raises:
            LinkError: the worker cannot be reached, is late, or failed.
            SpecSplitError: the worker answered with this error.
        """
        if len(request) > max(SMALL_BYTES, self._message_bytes):
            return await self._call_large(method, request, timeout_s)
        call = self._method(method, "unary_unary")(request, timeout=timeout_s, metadata=spans.inject())
        try:
            answer: bytes | None = await call
        except grpc.aio.AioRpcError as failure:
            raise self.error(failure) from failure
        except asyncio.CancelledError:
            self.raise_if_closed()
            raise
        if answer is None:
            raise WorkerFailed(f"{self._peer} ended the call in order, but with no message.")
        return answer

    def for_large(self, num_bytes: int) -> WorkerChannel:
        """Return a channel of its own for a message of so many bytes, whose pings may wait behind it on a slow link.

        Whoever asked closes it; it ends with this one at the latest.
        """
        self._renew()  # a large message may be the first that goes under another name
        large = WorkerChannel(self._address, self._peer, self._role, self._security, num_bytes)
        self._large.add(large)
        return large

    async def _call_large(self, method: str, request: bytes, timeout_s: float) -> bytes:
        large = self.for_large(len(request))
        try:
            return await large.call(method, request, timeout_s)
        finally:
            await large.aclose()

    async def stream(self, method: str, request: bytes, timeout_s: float) -> AsyncGenerator[bytes]:
        """Yield the answers to one call with a streamed response; raises as `call` does."""
        call = self._method(method, "unary_stream")(request, timeout=timeout_s, metadata=spans.inject())
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as failure:
            raise self.error(failure) from failure
        except asyncio.CancelledError:
            self.raise_if_closed()
            raise
        finally:
            call.cancel()

    def duplex(self, method: str) -> Duplex:
        """Begin a call that streams both ways; it has no deadline, the caller ends it with `cancel` or `end`."""
        return Duplex(self._method(method, "stream_stream")(metadata=spans.inject()), self)

    async def aclose(self) -> None:
        """Cut the connection; calls under way fail, and closing again does nothing."""
        self._is_closed = True
        channel, self._channel = self._channel, None
        retired, self._retired = self._retired, {}
        for closing in retired:
            closing.cancel()
        for each in [channel, *retired.values()]:
            if each is not None:
                await each.close()
        for large in list(self._large):
            await large.aclose()
        self._methods.clear()

    def close_soon(self) -> None:
        """Close the connection in a task of its own."""
        closing = asyncio.create_task(self.aclose(), name="specsplit-channel-close")
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)

    def _renew(self) -> None:
        """Have a channel that shows the certificate of now."""
        if self._is_closed:
            raise self.closed()
        version = self._security.version(self._address)
        if self._channel is not None and version != self._shown[0]:
            self._retire(self._channel)
            self._channel = None
        if self._channel is None:
            # Asked before the channel is made: a rotation in between then counts as a change the next time.
            (_, before), identity = self._shown, self._security.identity(self._address)
            self._channel, self._shown = self._open(), (version, identity)
            if before not in ("", identity):
                self.on_renamed()

    def _method(self, name: str, arity: str) -> Any:
        self._renew()
        if name not in self._methods:
            self._methods[name] = getattr(self._channel, arity)(name)
        return self._methods[name]

    def _open(self) -> grpc.aio.Channel:
        return self._security.open_channel(self._address, self._role, self._message_bytes)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        """Begin no more calls on a channel, and close it when its last one has ended."""
        self._methods.clear()
        closing = asyncio.create_task(channel.close(_RETIRED_S))
        self._retired[closing] = channel
        closing.add_done_callback(lambda task: self._retired.pop(task, None))

    def raise_if_closed(self) -> None:
        """Raise WorkerUnreachable if a call was cancelled because the channel was closed."""
        if self._is_closed and not _is_cancelled():
            raise WorkerUnreachable(f"{self._peer}: the connection was closed during the call.") from None

    def error(self, failure: grpc.aio.AioRpcError) -> SpecSplitError:
        """Return the error of the tree for a failed call."""
        return error_of(failure, self._peer)

    def closed(self) -> WorkerClosed:
        """Return the error for a call after `aclose`."""
        return WorkerClosed(f"{self._peer}: the connection has been closed; make a new one.")

    def cut(self) -> SpecSplitError:
        """Return the error for a stream that ended too early."""
        return WorkerUnreachable(f"{self._peer} ended the stream.")


def _is_cancelled() -> bool:
    """Return whether the task itself was cancelled, which has to go on; grpc.aio tells the end of a channel alike."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Duplex:
    """One call that streams both ways: one writer and one reader at a time."""

    def __init__(self, call: Any, channel: WorkerChannel) -> None:
        self._call, self._channel = call, channel
        self._lost: SpecSplitError | None = None
        """Error of a write that failed."""
        self._is_cancelled = False

    async def write(self, data: bytes) -> None:
        """Send a message when the peer has room for it.

        Raises:
            LinkError, SpecSplitError: the call has failed with this error.
        """
        try:
            await self._send(data)
        except grpc.aio.AioRpcError as failure:
            raise self._channel.error(failure) from failure
        except (grpc.aio.InternalError, asyncio.InvalidStateError) as failure:
            await self._raise_end(failure)
        except asyncio.CancelledError:
            self._raise_if_lost()
            self.cancel()
            raise

    async def _send(self, data: bytes) -> None:
        # If the peer ends the call meanwhile, grpc.aio's own `write` replaces its status by INTERNAL: a refusal would
        # look like a fault, and be tried again. What lies beneath leaves the status alone.
        beneath = getattr(self._call, "_cython_call", None)
        if beneath is None:  # another grpcio than those we know
            await self._call.write(data)
            return
        await self._call.wait_for_connection()
        await beneath.send_serialized_message(data)

    async def _raise_end(self, failure: Exception) -> NoReturn:
        """Raise the error that the call has ended with; its status comes with the messages before it, if any."""
        try:
            async with asyncio.timeout(_STATUS_S):
                await self._call.code()
        except TimeoutError:
            self._lost = self._channel.cut()
            self.cancel()
            raise self._lost from failure
        await self.read()
        raise self._channel.cut() from failure

    async def read(self) -> bytes | None:
        """Return the next message, None if the peer has ended the call in order; raises as `write` does."""
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise self._channel.error(failure) from failure
        except asyncio.CancelledError:
            self._raise_if_lost()
            raise
        return None if data is grpc.aio.EOF else cast(bytes, data)

    def _raise_if_lost(self) -> None:
        """Raise the reason if it was not the caller that ended the call."""
        self._channel.raise_if_closed()
        if self._lost is None and not self._is_cancelled and not _is_cancelled():
            self._lost = self._channel.cut()  # by grpc.aio, as the connection of before a rotation is closed
        if self._lost is not None:
            raise self._lost from None

    async def end(self) -> None:
        """Close our direction of the call; on a call that is over this does nothing."""
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await self._call.done_writing()

    def cancel(self) -> None:
        """Break the call off; doing so again has no effect."""
        self._is_cancelled = True
        self._call.cancel()
