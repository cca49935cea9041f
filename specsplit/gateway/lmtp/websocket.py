"""LMTP over a WebSocket: one connection is one client."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect

from specsplit.gateway.lmtp.session import LmtpSession
from specsplit.gateway.models import ModelTable

MAX_FRAME_BYTES = 16 << 20
"""The longest frame that a client may send."""


async def serve_websocket(socket: WebSocket, models: ModelTable, caller: str) -> None:
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
