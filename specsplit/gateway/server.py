"""The HTTP server: uvicorn on our own event loop, with time limits for idle and slow connections, and a drain."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from specsplit.core.errors import InvalidSettings
from specsplit.gateway.lmtp.protocol import LastWordProtocol
from specsplit.limits import HEADERS_S, KEEP_ALIVE_S, MAX_FRAME_BYTES, MAX_HEAD_BYTES

PING_S = 20.0
"""Period of a WebSocket's pings; a client that has not answered one for as long again is cut off."""
_FIRST_REQUEST_S = 1.0
"""Time for a connection that is new when the server drains to send the request that it was opened for."""
_LAST_WORDS_S = 2.0
"""Time for requests that a drain has ended to tell their clients."""


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which closes connections whose next request head does not come in time."""

    _waiting: asyncio.TimerHandle | None = None
    _is_last = False
    """Whether the next request is the only one."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._is_idle and self._waiting is None:
            self._wait_for_head()
        super().data_received(data)
        if not self._is_idle:
            self._stop_waiting()
            if self._is_last:
                super().shutdown()

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
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(HEADERS_S, self._close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_waiting()  # from here on it is no HTTP
        super().handle_websocket_upgrade(event)

    def _close(self) -> None:
        self._waiting = None
        if self._is_idle:
            self.transport.close()


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
        taking = asyncio.gather(*(self._take(accepted) for sock in sockets or [] for accepted in _accept_all(sock)))
        await super().shutdown(sockets)
        await taking

    async def _take(self, accepted: socket.socket) -> None:
        def protocol() -> LimitedProtocol:
            return LimitedProtocol(self.config, self.server_state, self.lifespan.state)

        _, taken = await asyncio.get_running_loop().connect_accepted_socket(protocol, accepted)
        taken.shutdown()


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
async def serving_http(app: ASGIApp, host: str, port: int, option: str = "--http") -> AsyncGenerator[HttpServer]:
    """Serve `app` at the address of `option` for the length of the block; port 0 picks a free one.

    Raises:
        InvalidSettings: nothing can listen there.
    """
    listener = _listen(host, port, option)
    config = uvicorn.Config(
        app,
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


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidSettings(f"Nothing can listen at {host}:{port} ({reason}); choose another {option}.") from error
