"""LMTP over a WebSocket: one connection is one client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from specsplit.gateway.keys import KeyRing
from specsplit.gateway.lmtp.session import LmtpSession
from specsplit.gateway.models import ModelTable

MAX_FRAME_BYTES = 16 << 20
"""The longest frame that a client may send."""


class LmtpApp:
    """Takes WebSockets at one path from clients that have a key; of HTTP it knows nothing else."""

    def __init__(self, models: ModelTable, keys: KeyRing | None, path: str, *, is_open: Callable[[], bool]) -> None:
        self._models, self._keys, self._is_open = models, keys, is_open
        self._paths = {path, path.rstrip("/") + "/"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            said = "This port speaks LMTP over WebSockets; OpenAI's API is at the address of --http.\n"
            await PlainTextResponse(said, 426, {"upgrade": "websocket"})(scope, receive, send)
            return
        socket = WebSocket(scope, receive, send)
        caller: str | None = ""
        if self._keys is not None:
            caller = self._keys.caller(socket.headers.get("authorization", ""))
        # A page of another site may open a WebSocket here, so what names its origin has to be from here.
        origin = socket.headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != socket.headers.get("host")
        if socket.url.path not in self._paths or caller is None or is_foreign or not self._is_open():
            await socket.close()  # before it is accepted: the client gets a 403
        else:
            await _serve(socket, self._models, caller)


async def _serve(socket: WebSocket, models: ModelTable, caller: str) -> None:
    """Answer a client until it leaves; its streams end with it."""
    await socket.accept()

    async def send(frame: str) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):  # it has left, and the loop below will notice
            await socket.send_text(frame)

    session = LmtpSession(models, send, caller)
    try:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                break
            text = message.get("text")
            await session.handle(text if text is not None else "")
    except asyncio.CancelledError:
        await session.close("The server is shutting down; ask again.")
        raise
    finally:
        await session.close()
