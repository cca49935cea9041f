"""Clients of the whole gateway that do not read what they asked for, or leave before it comes: over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest
from starlette.types import ASGIApp

from specsplit.gateway import server, sse
from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.server import serving_http
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.metrics import samples_of, value
from tests.support.rpc_servers import wait_until

BODY: dict[str, Any] = {"prompt": "a" * 400_000, "echo": True, "n": 12, "max_tokens": 8, "ignore_eos": True}
"""Its answers are larger than the buffers of both ends."""


async def gateway(target: FakeTarget, tokenizer: FakeTokenizer, metrics: Metrics) -> ASGIApp:
    orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"))
    model = ServedModel("small", await target.ping(), tokenizer, target, lambda _: orchestrator)
    return create_app(Gateway(models=ModelTable([model]), version="1", metrics=metrics))


def request(path: str, **fields: Any) -> bytes:
    content = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_frees_its_slots(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.05)
    target, metrics = FakeTarget(context=1 << 20), Metrics()
    app = await gateway(target, FakeTokenizer(), metrics)

    def metric(name: str, **labels: str) -> float:
        return value(samples_of(metrics.page().decode()), f"specsplit:{name}", **labels)

    with socket.socket() as deaf:
        async with serving_http(app, "127.0.0.1", 0, on_cut=metrics.ends.cut.inc) as running, asyncio.timeout(120):
            host, port = running.address.rsplit(":", 1)
            deaf.connect((host, int(port)))
            await asyncio.to_thread(deaf.sendall, request("/v1/completions", **BODY, stream=stream))
            await wait_until(lambda: metric("clients_not_reading_total") == 1)
            await wait_until(lambda: metric("num_requests_running") == metric("num_requests_waiting") == 0)
    assert target.num_tokens > 0
    assert not target.slots
    if stream:
        assert metric("request_success_total", finished_reason="abort") > 0, "answers that were not read"


class HeldTokenizer(FakeTokenizer):
    """Notes what it encodes, which takes until it is let go on."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        self.go_on.wait(60)
        return super().encode(text)


CHAT = {"messages": [{"role": "user", "content": "left"}]}


async def test_nobody_encodes_for_a_client_that_has_left() -> None:
    tokenizer, loop = HeldTokenizer(), asyncio.get_running_loop()
    app = await gateway(FakeTarget(), tokenizer, Metrics())
    async with serving_http(app, "127.0.0.1", 0) as running, asyncio.timeout(60):
        host, port = running.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request("/v1/completions", prompt="first", max_tokens=1))
        await wait_until(lambda: tokenizer.texts == ["first"])
        num_tasks = len(asyncio.all_tasks(loop))
        try:
            for path, fields in (
                ("/v1/completions", {"prompt": "left"}),
                ("/v1/chat/completions", CHAT),
                ("/tokenize", {"prompt": "left"}),
                ("/tokenize", CHAT),
            ):
                _, leaving = await asyncio.open_connection(host, int(port))
                leaving.write(request(path, **fields))
                await wait_until(lambda: len(asyncio.all_tasks(loop)) > num_tasks)
                leaving.close()
                await wait_until(lambda: len(asyncio.all_tasks(loop)) == num_tasks)
        finally:
            tokenizer.go_on.set()
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        writer.close()
    assert tokenizer.texts == ["first"]


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)], ids=["prompt", "chat"]
)
async def test_a_stream_has_words_while_its_prompt_is_encoded(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "QUIET_S", 0.05)
    tokenizer = HeldTokenizer()
    app = await gateway(FakeTarget(), tokenizer, Metrics())
    async with serving_http(app, "127.0.0.1", 0) as running, asyncio.timeout(60):
        host, port = running.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request(path, **fields, max_tokens=1, stream=True))
        try:
            await reader.readuntil(b": working\n\n")
        finally:
            tokenizer.go_on.set()
        assert b"finish_reason" in await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()
