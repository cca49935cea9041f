"""LMTP over a WebSocket: one connection is one client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from specsplit.engine.cancellation import to_its_end
from specsplit.gateway.hosts import foreign_host
from specsplit.gateway.keys import KeyRing
from specsplit.gateway.lmtp.protocol import DRAIN
from specsplit.gateway.lmtp.session import SHUTTING_DOWN, LmtpServer, LmtpSession
from specsplit.limits import MAX_FRAME_BYTES

_RESTARTING = 1012
_NOT_LET_IN = 1008
_REVOKED = "The key of this connection is not let in any more."
_BROKEN = {
    1002: "What was sent breaks the rules of WebSockets; the connection is closed.",
    1007: "What was sent is not UTF-8; the connection is closed.",
    1009: f"A frame has at most {MAX_FRAME_BYTES} bytes; the connection is closed.",
}
"""Errors of the streams of a client that broke the rules of WebSockets, by the code of the close."""


class LmtpApp:
    """Takes WebSockets at one path from clients that have a key; of HTTP it knows nothing else."""

    def __init__(self, server: LmtpServer, keys: KeyRing | None, path: str, *, is_open: Callable[[], bool]) -> None:
        self._server, self._keys, self._is_open = server, keys, is_open
        self._paths = {path, path.rstrip("/") + "/"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            said = "This port speaks LMTP over WebSockets; OpenAI's API is at the address of --http.\n"
            await PlainTextResponse(said, 426, {"upgrade": "websocket"})(scope, receive, send)
            return
        socket = WebSocket(scope, receive, send)

        def find_caller() -> str | None:
            return self._keys.caller(socket.headers.get("authorization", "")) if self._keys is not None else ""

        caller = find_caller()
        # A page of another site may open a WebSocket here, so what names its origin has to be from here.
        origin = socket.headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != socket.headers.get("host")
        is_foreign = is_foreign or (self._keys is None and foreign_host(scope) is not None)
        if scope["path"] not in self._paths or caller is None or is_foreign or not self._is_open():
            await socket.close()  # before it is accepted: the client gets a 403
            return
        await socket.accept()
        host, port = scope.get("client") or ("-", 0)
        connection = _Connection(self._server, receive, send, caller, f"{host}:{port}")
        await connection.serve(lambda: find_caller() == caller)


class _Connection:
    """One client, until it leaves or the server ends."""

    def __init__(self, server: LmtpServer, receive: Receive, send: Send, caller: str, name: str) -> None:
        self._receive, self._send = receive, send
        self._session = LmtpSession(server, self._send_frame, caller, f"{caller}@{name}" if caller else name)

    async def serve(self, is_let_in: Callable[[], bool]) -> None:
        """Answer the client's frames while its key is let in; its streams end with it."""
        draining: asyncio.Task[None] | None = None
        try:
            while (message := await self._receive())["type"] != "websocket.disconnect":
                if message["type"] == DRAIN:
                    draining = draining or asyncio.create_task(self._drain(SHUTTING_DOWN, _RESTARTING))
                    continue
                is_revoked = draining is None and not is_let_in()
                if is_revoked:
                    self._session.refuse_streams(_REVOKED)
                await self._session.handle(message.get("text") or "")
                # Only now: what the frame asks for is refused before the connection is closed.
                if is_revoked:
                    draining = asyncio.create_task(self._drain(_REVOKED, _NOT_LET_IN))
            await self._end(message.get("code", 0))
        except asyncio.CancelledError:  # the time to drain is over
            if draining is not None:
                draining.cancel()
            await to_its_end(self._leave(SHUTTING_DOWN, _RESTARTING))
        finally:
            if draining is not None:
                draining.cancel()
            await self._session.close()

    async def _drain(self, reason: str, code: int) -> None:
        """Let the streams that are open end, and leave with the code of the close."""
        self._session.refuse_streams(reason)
        await self._session.wait()
        await self._leave(None, code)

    async def _end(self, code: int) -> None:
        """End the streams of a client that has left, or was cut off for what it sent."""
        reason = _BROKEN.get(code)
        await self._leave(reason, code) if reason is not None else await self._session.close()

    async def _leave(self, reason: str | None, code: int) -> None:
        await self._session.close(reason)
        await self._put({"type": "websocket.close", "code": code})

    async def _send_frame(self, frame: str) -> None:
        await self._put({"type": "websocket.send", "text": frame})

    async def _put(self, message: dict[str, Any]) -> None:
        with suppress(OSError, RuntimeError):  # the client has left, and the loop above will notice
            await self._send(message)
