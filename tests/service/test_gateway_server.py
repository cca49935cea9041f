"""The HTTP server and its streams over a real socket, with a small application: limits of time, comments, drains."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import httpx2 as httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specsplit.core.errors import InvalidSettings, WorkerUnreachable
from specsplit.core.progress import Progress, current_listener
from specsplit.gateway import server, sse
from specsplit.gateway.server import HttpServer, serving_http
from specsplit.gateway.sse import EventStream
from specsplit.limits import KEEP_ALIVE_S
from tests.support.rpc_servers import wait_until

WHOLE = b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\n"
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Answers every path with an event stream that a test steers; /whole answers at once."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.error: Exception | None = None
        self.num_events, self.text = 1, ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Response("ok") if scope["path"] == "/whole" else EventStream(self._events())
        await answer(scope, receive, send)

    async def _events(self) -> AsyncGenerator[dict[str, Any]]:
        try:
            for number in range(self.num_events):
                yield {"number": number, "text": self.text}
                await asyncio.sleep(0)  # as for a worker
            listener = current_listener()
            assert listener is not None
            listener(Progress(queued=5, position=2))
            await self.go_on.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.has_ended.set()


@asynccontextmanager
async def connected(running: HttpServer) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = running.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(30):
            yield reader, writer
    finally:
        writer.close()


async def test_a_pause_is_filled_with_comments_that_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "QUIET_S", 0.05)
    app = App()
    async with serving_http(app, "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(REQUEST)
        said = await reader.readuntil(b": waiting: position 2 of 5\n\n")
        assert b"200 OK" in said
        app.go_on.set()
        assert b"data: [DONE]\n\n" in await reader.readuntil(b"\r\n0\r\n\r\n")


async def test_a_pause_behind_an_event_says_nothing_of_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "QUIET_S", 0.05)
    go_on = asyncio.Event()

    async def events() -> AsyncGenerator[dict[str, Any]]:
        listener = current_listener()
        assert listener is not None
        listener(Progress(queued=5, position=2))
        yield {"number": 0}
        await go_on.wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events())(scope, receive, send)

    async with serving_http(app, "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(REQUEST)
        said = await reader.readuntil(b": working\n\n")
        go_on.set()
        assert b"waiting" not in said + await reader.readuntil(b"\r\n0\r\n\r\n")


async def test_a_stream_asks_proxies_to_hand_its_events_on() -> None:
    app = App()
    app.go_on.set()
    async with serving_http(app, "127.0.0.1", 0) as running, httpx.AsyncClient() as http:
        headers = (await http.get(f"http://{running.address}/")).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache")


async def test_no_character_of_a_text_ends_the_line_of_its_event() -> None:
    app = App()
    app.text = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\ne\\u2028 \N{EURO SIGN}"
    app.go_on.set()
    async with (
        serving_http(app, "127.0.0.1", 0) as running,
        httpx.AsyncClient() as http,
        http.stream("GET", f"http://{running.address}/") as answer,
    ):
        lines = [line async for line in answer.aiter_lines() if line]
    assert [line.partition(": ")[0] for line in lines] == ["data", "data"]
    assert json.loads(lines[0].removeprefix("data: "))["text"] == app.text
    assert "\N{EURO SIGN}" in lines[0]


async def test_an_error_before_the_first_event_is_an_ordinary_answer() -> None:
    app = App()
    app.num_events, app.error = 0, WorkerUnreachable("away")
    app.go_on.set()
    async with serving_http(app, "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"503 Service Unavailable" in head
        assert b"retry-after: 1" in head


@pytest.mark.parametrize(("error", "said"), [(WorkerUnreachable("away"), "away"), (RuntimeError("x"), "An unexpected")])
async def test_an_error_after_the_first_event_is_one_event_and_the_end(error: Exception, said: str) -> None:
    app = App()
    app.error = error
    app.go_on.set()
    async with serving_http(app, "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(REQUEST)
        lines = [line for line in (await reader.readuntil(b"\r\n0\r\n\r\n")).split(b"\n") if line.startswith(b"data: ")]
        assert len(lines) == 2
        assert json.loads(lines[1].removeprefix(b"data: "))["error"]["message"].startswith(said)


async def test_a_client_that_leaves_ends_its_stream() -> None:
    app = App()
    async with serving_http(app, "127.0.0.1", 0) as running, asyncio.timeout(30):
        async with connected(running) as (reader, writer):
            writer.write(REQUEST)
            await reader.readuntil(b"data:")
        await app.has_ended.wait()


async def test_a_client_that_does_not_read_is_cut_off_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.05)
    caplog.set_level("INFO", "specsplit.sessions")
    app, num_cut = App(), 0
    app.num_events, app.text = 1 << 60, "x" * 65_536

    def count() -> None:
        nonlocal num_cut
        num_cut += 1

    with socket.socket() as deaf:
        async with serving_http(app, "127.0.0.1", 0, on_cut=count) as running, asyncio.timeout(60):
            host, port = running.address.rsplit(":", 1)
            deaf.connect((host, int(port)))
            deaf.sendall(REQUEST)
            await app.has_ended.wait()
            async with connected(running) as (reader, writer):
                writer.write(WHOLE)
                assert await reader.readuntil(b"ok"), "others are answered"
    assert num_cut == 1
    said = [record.message for record in caplog.records if record.name == "specsplit.sessions"]
    assert said == ["lost request : status 499, client_not_reading"]


async def test_a_client_that_reads_slowly_is_seen_to_read() -> None:
    """The system's buffer takes megabytes before ours has room again, for which a slow client takes minutes."""
    loop, made = asyncio.get_running_loop(), asyncio.Queue[asyncio.WriteTransport]()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.put_nowait(cast("asyncio.WriteTransport", transport))

    serving = await loop.create_server(Protocol, "127.0.0.1", 0)
    with socket.create_connection(serving.sockets[0].getsockname()) as client:
        transport = await made.get()
        transport.write(bytes(1 << 25))
        before = 0
        while (now := server.num_unread(transport)) != before:  # the client's own buffer fills up
            before = now
            await asyncio.sleep(0.05)
        ours = transport.get_write_buffer_size()
        for _ in range(64):
            client.recv(16_384)
        assert transport.get_write_buffer_size() == ours, "it has no room yet"
        assert server.num_unread(transport) < before
        transport.abort()
    serving.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET /whole HTTP/1.1\r\nHost: x\r\nSlow: "])
async def test_a_head_that_does_not_come_closes_the_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.3)
    async with serving_http(App(), "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


async def test_a_second_head_has_its_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_http(App(), "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(WHOLE)
        assert await reader.readuntil(b"ok")
        monkeypatch.setattr(server, "HEADERS_S", 0.05)
        writer.write(b"GET /wh")
        assert await reader.read() == b""


async def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.5)
    app = App()
    async with serving_http(app, "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"data:")
        await asyncio.sleep(0.7)
        app.go_on.set()
        assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")


async def test_an_idle_connection_is_closed_later_than_a_proxy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies_s = {"AWS's load balancers": 60, "nginx's upstreams": 60}
    assert all(idle_s < KEEP_ALIVE_S for idle_s in proxies_s.values())
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    async with serving_http(App(), "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(WHOLE)
        assert await reader.readuntil(b"ok")
        async with asyncio.timeout(30):
            assert not await reader.read()


async def test_idle_connections_keep_nobody_out() -> None:
    async with serving_http(App(), "127.0.0.1", 0) as running, asyncio.timeout(60):
        host, port = running.address.rsplit(":", 1)
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
        async with connected(running) as (reader, writer):
            writer.write(WHOLE)
            assert await reader.readuntil(b"ok")
        for _, writer in idle:
            writer.close()


async def _until_nobody_is_let_in(running: HttpServer) -> None:
    host, port = running.address.rsplit(":", 1)
    with suppress(OSError):
        while True:
            # While the listener ends nobody is refused yet, and nobody let in.
            _, late = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 0.2)
            late.close()
            await asyncio.sleep(0.01)


async def test_a_drain_waits_for_streams_and_then_ends_them() -> None:
    app = App()
    async with serving_http(app, "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"data:")
        draining = asyncio.create_task(running.drain(30))
        await _until_nobody_is_let_in(running)
        assert not draining.done()
        app.go_on.set()
        assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
        await draining

    app = App()
    async with serving_http(app, "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"data:")
        await running.drain(0)
        await app.has_ended.wait()


async def test_a_drain_says_what_it_cut_off_and_nothing_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for sent, words in ((b"", []), (REQUEST, ["Cancel 1 running task(s), timeout graceful shutdown exceeded"])):
        async with serving_http(App(), "127.0.0.1", 0) as running, connected(running) as (reader, writer):
            writer.write(sent)
            if sent:
                await reader.readuntil(b"data:")
            await running.drain(0)
        lines = [record.getMessage() for record in caplog.records]
        assert [line for line in lines if line.startswith("Cancel")] == words


async def test_a_connection_that_is_new_when_a_drain_begins_is_answered() -> None:
    async with serving_http(App(), "127.0.0.1", 0) as running, connected(running) as (reader, writer):
        draining = asyncio.create_task(running.drain(30))
        await _until_nobody_is_let_in(running)
        writer.write(WHOLE)
        assert (await reader.read()).endswith(b"ok"), "the answer, and the end"
        await draining


async def test_whoever_reached_a_draining_server_is_answered() -> None:
    async with serving_http(App(), "127.0.0.1", 0) as running:
        host, port = running.address.rsplit(":", 1)
        answers: list[bytes] = []

        def ask() -> None:
            with suppress(ConnectionRefusedError):
                while True:
                    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as answer:
                        connection.sendall(WHOLE.replace(b"Host", b"Connection: close\r\nHost"))
                        answers.append(answer.read())

        asking = [asyncio.create_task(asyncio.to_thread(ask)) for _ in range(16)]
        loop, draining = asyncio.get_running_loop(), asyncio.create_task(_drain_later(running, answers))
        while not draining.done():
            loop.call_soon(time.sleep, 0.02)  # a busy loop, in whose turns connections pile up
            await asyncio.sleep(0)
        await asyncio.gather(*asking)
    assert [answer for answer in answers if not answer.endswith(b"ok")] == []


async def _drain_later(running: HttpServer, answers: list[bytes]) -> None:
    await wait_until(lambda: len(answers) > 16)
    await running.drain(30)


async def test_an_address_in_use_is_one_sentence() -> None:
    async with serving_http(App(), "127.0.0.1", 0) as running:
        with pytest.raises(InvalidSettings, match="Nothing can listen at"):
            async with serving_http(App(), "127.0.0.1", int(running.address.rsplit(":", 1)[1])):
                pass


def test_the_gateway_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import specsplit.assembly.gateway, specsplit.model.tokenizer"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
