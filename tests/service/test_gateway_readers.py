"""Clients of the whole gateway that do not read what they asked for: over real sockets, whose buffers fill up."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from specsplit.gateway import server
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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_frees_its_slots(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.05)
    target, tokenizer, metrics = FakeTarget(context=1 << 20), FakeTokenizer(), Metrics()
    orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"))
    model = ServedModel("small", await target.ping(), tokenizer, target, lambda _: orchestrator)
    app = create_app(Gateway(models=ModelTable([model]), version="1", metrics=metrics))

    def metric(name: str) -> float:
        return value(samples_of(metrics.page().decode()), f"specsplit:{name}")

    content = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as deaf:
        async with serving_http(app, "127.0.0.1", 0, on_cut=metrics.ends.cut.inc) as running, asyncio.timeout(120):
            host, port = running.address.rsplit(":", 1)
            deaf.connect((host, int(port)))
            await asyncio.to_thread(deaf.sendall, head.encode() + content)
            await wait_until(lambda: metric("clients_not_reading_total") == 1)
            await wait_until(lambda: metric("num_requests_running") == metric("num_requests_waiting") == 0)
    assert target.num_tokens > 0
    assert not target.slots
    if stream:
        assert metric("request_failed_total") > 0, "answers that were not read are no success"
