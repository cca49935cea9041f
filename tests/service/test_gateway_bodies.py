"""Bodies that are too large, over real sockets: every client reads the refusal, and the rest of the body is dropped."""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress

import httpx2 as httpx
import openai
import pytest

from specsplit.gateway import server
from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.models import ModelTable
from specsplit.gateway.server import HttpServer, serving_http
from specsplit.limits import MAX_BODY_BYTES

LARGE = MAX_BODY_BYTES + (7 << 20)
JSON_TYPE = {"content-type": "application/json"}
PATH = "/v1/completions"


@asynccontextmanager
async def running(max_body_bytes: int = MAX_BODY_BYTES) -> AsyncGenerator[HttpServer]:
    gateway = Gateway(models=ModelTable([]), version="1", max_body_bytes=max_body_bytes)
    async with serving_http(create_app(gateway), "127.0.0.1", 0) as http_server, asyncio.timeout(60):
        yield http_server


def check_refusal(status: int, body: bytes) -> None:
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


async def test_a_client_that_writes_its_whole_body_first_reads_the_refusal() -> None:
    """Python's own client, which fails if the connection is reset while it writes; it asks twice on one connection."""

    def ask(address: str) -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.connect()
        own = connection.sock.getsockname()
        for _ in range(2):
            connection.request("POST", PATH, b" " * LARGE, JSON_TYPE)
            answer = connection.getresponse()
            check_refusal(answer.status, answer.read())
        assert connection.sock.getsockname() == own
        connection.close()

    async with running() as http_server:
        await asyncio.to_thread(ask, http_server.address)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_of_some_megabytes_is_refused_with_a_sentence(is_chunked: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(LARGE >> 16):
            yield b" " * (1 << 16)

    def ask(address: str) -> None:
        content = chunks() if is_chunked else b" " * LARGE
        refused = httpx.post(f"http://{address}{PATH}", content=content, headers=JSON_TYPE, timeout=60)
        check_refusal(refused.status_code, refused.content)
        assert "connection" not in refused.headers

    async with running() as http_server:
        await asyncio.to_thread(ask, http_server.address)


async def test_openais_client_reads_that_a_body_is_too_large() -> None:
    async with running() as http_server:
        url = f"http://{http_server.address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIStatusError, match=f"larger than {MAX_BODY_BYTES} bytes") as refused:
                await client.completions.create(model="x", prompt="a" * LARGE)
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")


async def test_a_body_that_never_ends_is_dropped_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.5)

    def send_for_ever(address: str) -> bytes:
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: {address}\r\nTransfer-Encoding: chunked\r\n".encode())
            connection.sendall(b"Content-Type: application/json\r\n\r\n")
            chunk, answer = b"10000\r\n%b\r\n" % (b" " * (1 << 16)), b""
            with suppress(ConnectionError):
                while True:
                    connection.sendall(chunk)
                    if select.select([connection], [], [], 0)[0]:
                        answer += connection.recv(1 << 16)
        return answer

    async with running() as http_server:
        answer = await asyncio.to_thread(send_for_ever, http_server.address)
    assert b" 413 " in answer
    assert b"body_too_large" in answer


async def test_a_connection_goes_on_when_the_rest_of_a_body_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(max_body_bytes=10) as http_server:
        host, port = http_server.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {PATH} HTTP/1.1\r\nHost: {http_server.address}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 11\r\n\r\n".encode())
        assert b"body_too_large" in await reader.readuntil(b"}}")
        monkeypatch.setattr(server, "HEADERS_S", 0.05)
        writer.write(b" " * 11)
        await asyncio.sleep(0.2)
        writer.write(f"GET /health HTTP/1.1\r\nHost: {http_server.address}\r\n\r\n".encode())
        assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
