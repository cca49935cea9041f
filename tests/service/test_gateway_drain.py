"""What clients of HTTP are told whose answers the gateway has no time to finish when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx

from specsplit.core.types import Proposal, Turn, Verdict
from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.server import HttpServer, serving_http
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.rpc_servers import wait_until

BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "temperature": 0}


class StuckTarget(FakeTarget):
    """Answers the first round of each session, and no other."""

    num_stuck = 0

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        if turn.opening is None:
            self.num_stuck += 1
            await asyncio.get_running_loop().create_future()
        return await super().verify(turn, proposal)


@asynccontextmanager
async def serving_stuck() -> AsyncGenerator[tuple[HttpServer, StuckTarget, httpx.AsyncClient]]:
    target, tokenizer = StuckTarget(), FakeTokenizer()
    orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"))
    model = ServedModel("small", await target.ping(), tokenizer, target, lambda _: orchestrator)
    app = create_app(Gateway(models=ModelTable([model]), version="1"))
    async with (
        serving_http(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=f"http://{server.address}", timeout=60) as client,
    ):
        yield server, target, client


async def test_an_answer_cut_by_a_drain_says_so_and_when_to_come_back() -> None:
    async with serving_stuck() as (server, target, client):
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await wait_until(lambda: target.num_stuck == 1)
        assert await server.drain(0) == 1
        answer = await asking
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "server_shutting_down"
        assert answer.headers["x-request-id"]


async def test_a_stream_cut_by_a_drain_ends_with_an_error_event() -> None:
    async with serving_stuck() as (server, target, client):
        traced = {"stream": True, "speculative": {"trace": True}}  # an event a round, with text or without
        asking = asyncio.create_task(client.post("/v1/completions", json={**BODY, **traced}))
        await wait_until(lambda: target.num_stuck == 1)
        assert await server.drain(0) == 1
        events = [line for line in (await asking).text.splitlines() if line.startswith("data: ")]
        assert len(events) == 2, "the first round, and the error"
        assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "server_shutting_down"
