"""uvicorn's WebSocket, which lets LMTP say why before it closes. Knows frames of WebSockets, and none of LMTP."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode

MAX_UNREAD_BYTES = 1 << 20
"""A client that sends pings while so much waits for it is cut off."""
DRAIN = "specsplit.drain"
"""The type of the message that asks the application to come to its end."""


class LastWordProtocol(WebSocketsSansIOProtocol):
    """Closes only after the application has sent its last frames and asked for it, whoever is to blame.

    uvicorn itself closes at once when it shuts down, or when a client breaks the rules of WebSockets.
    """

    _close_frame: bytes | None = None
    """Made for a client that broke the rules; it waits for the application's last frames."""

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": DRAIN})  # pyright: ignore[reportArgumentType]  (between us two)
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        # Whatever comes behind a broken frame is read and dropped: unread bytes would reset the connection, and the
        # client might never see our last frames.
        if self._close_frame is None:
            super().data_received(data)

    def handle_ping(self) -> None:
        # Answers of pings wait for nobody: a client that reads none of them would fill our memory with them.
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.transport.abort()
            return
        super().handle_ping()

    def handle_parser_exception(self) -> None:
        self.handle_events()  # whole frames before the broken one
        self._close_frame = b"".join(self.conn.data_to_send())
        sent = self.conn.close_sent
        assert sent is not None, "made with the exception"
        self.queue.put_nowait({"type": "websocket.disconnect", "code": sent.code, "reason": sent.reason})

    async def send(self, message: Any) -> None:
        if self._close_frame is None or self.close_sent:
            await super().send(message)
            return
        await self.writable.wait()
        if self.disconnected:
            return
        if message["type"] == "websocket.send":
            self.transport.write(Frame(Opcode.TEXT, message["text"].encode()).serialize(mask=False))
        elif message["type"] == "websocket.close":
            self.transport.write(self._close_frame)
            self.close_sent = True
            self.transport.resume_reading()
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        # A client that lives but does not read would never take the rest, and keep its slots.
        self.transport.abort()
