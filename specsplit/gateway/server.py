"""The HTTP server: uvicorn on our own event loop, with time limits for idle, slow and deaf connections, and a drain."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import sys
import termios
from array import array
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from specsplit.core.errors import InvalidSettings
from specsplit.gateway.hosts import listening_at
from specsplit.gateway.lmtp.protocol import LastWordProtocol
from specsplit.limits import HEADERS_S, KEEP_ALIVE_S, MAX_FRAME_BYTES, MAX_HEAD_BYTES, SEND_S
from specsplit.rpc.listening import listener_at
from specsplit.telemetry.session_log import log_request

PING_S = 20.0
"""Period of a WebSocket's pings; a client that has not answered one for as long again is cut off."""
_FIRST_REQUEST_S = 1.0
"""Time for a connection that is new when the server drains to send the request that it was opened for."""
_LAST_WORDS_S = 2.0
"""Time for requests that a drain has ended to tell their clients."""
_HANDSHAKE_S = 0.1
"""Time for handshakes that have begun when the server drains: a slow round trip."""
_SO_ATTACH_FILTER = 26
"""Number of the socket option on Linux; the `socket` module does not name it."""
_WITHOUT_SYN = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the flags of the TCP header
        (0x45, 0, 1, 0x02),  # is it a SYN?
        (0x06, 0, 0, 0),  # then drop it
        (0x06, 0, 0, 0xFFFFFFFF),
    )
)
"""A packet filter (BPF) of a listening socket: no new handshake begins, and those that have begun can end."""


class _Config(uvicorn.Config):
    """uvicorn's settings, and who is called for each client that was cut off since it did not read."""

    on_cut: Callable[[], None] = staticmethod(lambda: None)


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which ends connections that send no request head in time, or do not read their answer."""

    _waiting: asyncio.TimerHandle | None = None
    """Until the next head has to be there."""
    _sending: asyncio.TimerHandle | None = None
    """Until the client has to have taken something; only while it leaves something unread."""
    _is_last = False
    """Whether the next request is the only one."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # whatever the client leaves unread pauses its answer
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._is_idle and self._waiting is None:
            self._wait_for_head()
        # If the answer came before the whole body, the rest of the body is read and dropped, for HEADERS_S at most.
        drains = self._is_idle and self.conn.their_state is h11.SEND_BODY
        super().data_received(data)
        if not self._is_idle:
            self._stop_waiting()
            if self._is_last:
                super().shutdown()
        elif drains and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._stop_waiting()
            self._keep_alive()

    def shutdown(self) -> None:
        """End with the answer that is under way; a connection that was opened a moment ago has yet to ask."""
        cycle: Any = self.cycle
        if cycle is None:
            self._is_last = True
            self._stop_waiting()
            self._waiting = self.loop.call_later(_FIRST_REQUEST_S, self._close)
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_sending()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._stop_sending()
        super().resume_writing()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _keep_alive(self) -> None:
        """Wait for another request, as behind every answer."""
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(HEADERS_S, self._close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        # From here on it is no HTTP: LMTP looks after its clients by pings.
        self._stop_waiting()
        self._stop_sending()
        self.transport.set_write_buffer_limits()
        super().handle_websocket_upgrade(event)

    def _wait_for_reader(self) -> None:
        self._sending = self.loop.call_later(SEND_S, self._check_reader, num_unread(self.transport))

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _check_reader(self, num_before: int) -> None:
        if num_unread(self.transport) < num_before:
            self._wait_for_reader()  # it is slow, and yet it reads
            return
        cycle: Any = self.cycle
        config = self.config
        state: dict[str, str] = cycle.scope.get("state", {}) if cycle is not None else {}
        log_request("lost", state.get("request_id", ""), 499, "client_not_reading")
        assert isinstance(config, _Config), "made by serving_http"
        config.on_cut()
        # Closing would wait for the client to read the rest. The application hears that the client has gone.
        self.transport.abort()

    def _close(self) -> None:
        self._waiting = None
        if self._is_idle:
            self.transport.close()


def num_unread(transport: asyncio.WriteTransport) -> int:
    """Return the bytes that were sent to a client and have not reached it, in our buffer and in the system's."""
    count = transport.get_write_buffer_size()
    with suppress(OSError):  # a system that does not tell
        told = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        count += int.from_bytes(told, sys.byteorder)
    return count


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to whoever runs the loop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take in the connections that nobody has accepted yet, which their clients hold for open, and end."""
        are_filtered = [_begin_no_handshake(sock) for sock in sockets or []]
        if any(are_filtered):
            await asyncio.sleep(_HANDSHAKE_S)
        taking = asyncio.gather(*(self._take(accepted) for sock in sockets or [] for accepted in _accept_all(sock)))
        await super().shutdown(sockets)
        await taking

    async def _take(self, accepted: socket.socket) -> None:
        def protocol() -> LimitedProtocol:
            return LimitedProtocol(self.config, self.server_state, self.lifespan.state)

        _, taken = await asyncio.get_running_loop().connect_accepted_socket(protocol, accepted)
        taken.shutdown()


def _begin_no_handshake(listener: socket.socket) -> bool:
    """Let no connection begin between the last that is accepted and the listener's end, which would reset it.

    Whoever tries meanwhile is refused when its system asks again, a second later. Returns whether that can be done.
    """
    if sys.platform != "linux":
        return False
    program = array("B", _WITHOUT_SYN)
    address, num_bytes = program.buffer_info()
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", num_bytes // 8, address))
        return True
    return False  # a sandbox without packet filters


def _accept_all(listener: socket.socket) -> list[socket.socket]:
    """Return the connections that wait to be accepted: closing the listener would reset them."""
    accepted: list[socket.socket] = []
    with suppress(OSError):
        while True:
            accepted.append(listener.accept()[0])
    return accepted


class HttpServer:
    """One running server; made by `serving_http`."""

    def __init__(self, server: _Uvicorn, running: asyncio.Task[None], address: str) -> None:
        self.address = address
        """Address as HOST:PORT, with the port that was bound."""
        self._server, self._running = server, running

    async def drain(self, grace_s: float) -> int:
        """Take no new connection, give requests under way `grace_s` seconds to end, then end them; return how many."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s)) if grace_s else 0
        self._server.should_exit = True
        await asyncio.wait({self._running})
        num_cut = len(self._server.server_state.tasks)
        if tasks := self._server.server_state.tasks:  # cancelled by now; they tell their clients so
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
        return num_cut


@asynccontextmanager
async def serving_http(
    app: ASGIApp, host: str, port: int, option: str = "--http", on_cut: Callable[[], None] = lambda: None
) -> AsyncGenerator[HttpServer]:
    """Serve `app` at the address of `option` for the length of the block; port 0 picks a free one.

    `on_cut` is called for each client that was cut off since it did not read.

    Raises:
        InvalidSettings: nothing can listen there.
    """
    listener = _listen(host, port, option)
    config = _Config(
        listening_at(host, app),
        http=LimitedProtocol,
        ws=LastWordProtocol,
        ws_max_size=MAX_FRAME_BYTES,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    config.on_cut = on_cut
    logging.getLogger("uvicorn.error").addFilter(_is_of_use)
    server = _Uvicorn(config)
    running = asyncio.create_task(server.serve([listener]))
    await server.has_started.wait()
    shown = f"[{host}]" if ":" in host else host
    serving = HttpServer(server, running, f"{shown}:{listener.getsockname()[1]}")
    try:
        yield serving
    finally:
        await serving.drain(0)
        listener.close()


def _is_of_use(line: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's log says something: not if a drain whose time is over has cut off nothing."""
    return not line.getMessage().startswith("Cancel 0 running task(s)")


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        return listener_at(host, port)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidSettings(f"Nothing can listen at {host}:{port} ({reason}); choose another {option}.") from error
