"""What one key may have of the gateway, over HTTP and LMTP: beyond it 429, with the time to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx2 as httpx
import pytest

from specsplit.engine import caller_limits
from specsplit.engine.caller_limits import CallerLimits
from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.keys import KeyRing, new_key
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.quotas import GatewayQuotas
from specsplit.gateway.server import serving_http
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import RetryPolicy
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.support.long_target import long_model
from tests.support.metrics import samples_of, value
from tests.support.rpc_servers import LOOPBACK, verifier_at, wait_until
from tests.support.runners import SteeredRunner, steered

BODY: dict[str, Any] = {"prompt": [1, 2, 3, 4], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
NO_LIMITS = CallerLimits()


class Served:
    """A gateway over a target, with two keys."""

    def __init__(self, url: str, keys: dict[str, str], metrics: Metrics, runner: SteeredRunner) -> None:
        self.runner = runner
        self._url, self._keys, self._metrics = url, keys, metrics

    async def ask(self, name: str, path: str = "/v1/completions", **changes: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._keys[name]}"}
        async with httpx.AsyncClient(base_url=self._url, timeout=60, headers=headers) as client:
            body = {"prompt": "abc"} if path == "/tokenize" else {**BODY, **changes}
            return await client.post(path, json=body)

    @asynccontextmanager
    async def lmtp(self, name: str) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
        headers = {"authorization": f"Bearer {self._keys[name]}"}
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{self._url}/lmtp", headers=headers) as socket:
            yield socket

    def metric(self, name: str, **labels: str) -> float:
        return value(samples_of(self._metrics.page().decode()), f"specsplit:{name}", **labels)


@asynccontextmanager
async def served(
    max_requests: int | None = None, tokens_per_s: float | None = None, worker: CallerLimits = NO_LIMITS
) -> AsyncGenerator[Served]:
    loaded, runner = steered(long_model(4))
    engine = TargetEngine(loaded)
    engine.open_queue()
    engine.quotas.limit(worker)
    service, made = TargetService(engine, lambda: engine.num_sessions, engine), {}
    for name in ("alice", "bob"):
        made[name] = new_key(name)
    keys = KeyRing({line.partition(":")[2]: name for name, (_, line) in made.items()})
    async with serving(LOOPBACK, [service]) as server, verifier_at(server) as verifier:
        policy, tokenizer = RetryPolicy(waits_when_full=False), loaded.tokenizer
        assert tokenizer is not None
        orchestrator = Orchestrator(verifier, None, tokenizer, Speculation(mode="plain"), retry_policy=policy)
        model = ServedModel(
            name="small",
            identity=await orchestrator.connect(),
            tokenizer=tokenizer,
            verifier=verifier,
            orchestrator=lambda mode: orchestrator,
        )
        metrics = Metrics()
        quotas = GatewayQuotas(max_requests, tokens_per_s, lambda limit: metrics.over_limit.labels(limit).inc())
        gateway = Gateway(models=ModelTable([model]), version="1", keys=keys, metrics=metrics, quotas=quotas)
        async with serving_http(create_app(gateway), "127.0.0.1", 0) as http:
            yield Served(f"http://{http.address}", {name: key for name, (key, _) in made.items()}, metrics, runner)
        await orchestrator.aclose()
    await engine.aclose()


def check_refusal(answer: httpx.Response, kind: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (429, kind, "rate_limit_exceeded"), answer.text
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_with_all_its_requests_under_way_is_told_to_come_back(stream: bool) -> None:
    async with served(max_requests=2) as gateway:
        with gateway.runner.held():
            first = [asyncio.create_task(gateway.ask("alice", stream=stream)) for _ in range(2)]
            await gateway.runner.wait_entered()
            await wait_until(lambda: gateway.metric("num_requests_waiting") == 2)
            check_refusal(await gateway.ask("alice", stream=stream), "requests")
            other = asyncio.create_task(gateway.ask("bob", n=3))
        assert {(await answer).status_code for answer in [*first, other]} == {200}
        assert (await gateway.ask("alice")).status_code == 200, "the others have ended"
        assert gateway.metric("requests_over_limit_total", limit="requests") == 1


async def test_a_key_that_used_up_its_tokens_is_told_when_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_limits, "BURST_S", 1.0)
    async with served(tokens_per_s=0.5) as gateway:
        assert (await gateway.ask("alice")).status_code == 200
        refused = await gateway.ask("alice")
        check_refusal(refused, "tokens")
        assert (await gateway.ask("bob", echo=True, max_tokens=0)).status_code == 200
        assert gateway.metric("requests_over_limit_total", limit="tokens") == 1


async def test_a_prompt_beyond_the_limits_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_limits, "BURST_S", 1.0)
    async with served(tokens_per_s=0.5) as gateway:
        assert (await gateway.ask("alice")).status_code == 200

        async def encode(*arguments: Any) -> list[int]:
            pytest.fail("a long prompt takes the tokenizer seconds")

        monkeypatch.setattr(ServedModel, "encode", encode)
        check_refusal(await gateway.ask("alice", prompt="abc"), "tokens")
        check_refusal(await gateway.ask("alice", "/tokenize"), "tokens")


@pytest.mark.parametrize("first", ["HTTP", "GENERATE", "SCORE"])
async def test_a_prompt_that_is_encoded_is_a_request_under_way(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, begun, gate = ServedModel.encode, asyncio.Event(), asyncio.Event()

    async def held(*arguments: Any) -> list[int]:
        begun.set()
        await gate.wait()
        return await encode(*arguments)

    monkeypatch.setattr(ServedModel, "encode", held)
    async with served(max_requests=1) as gateway, gateway.lmtp("alice") as socket:
        if first == "HTTP":
            asking = asyncio.create_task(gateway.ask("alice", prompt="abc"))
        else:
            asked = {"stream_id": 1, "prompt": "abc", "scored": "abc", "max_tokens": 2}
            await socket.send_str(f"{first} {json.dumps(asked)}")
            asking = asyncio.create_task(socket.receive_str())  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await begun.wait()
        check_refusal(await gateway.ask("alice", prompt="abc"), "requests")
        gate.set()
        answer = await asking
        assert getattr(answer, "status_code", 200) == 200, answer
        assert "limit" not in str(answer)


async def test_lmtp_waits_where_a_key_is_beyond_its_limit() -> None:
    async with served(max_requests=1) as gateway, gateway.lmtp("alice") as socket:
        with gateway.runner.held():
            asking = asyncio.create_task(gateway.ask("alice"))
            await gateway.runner.wait_entered()
            asked = {"stream_id": 1, "prompt": "abc", "max_tokens": 1}
            await socket.send_str(f"GENERATE {json.dumps(asked)}")
            async with asyncio.timeout(60):
                assert '"status":"queued"' in await socket.receive_str()
        assert (await asking).status_code == 200
        async with asyncio.timeout(60):
            while '"finish_reason"' not in (heard := await socket.receive_str()):
                assert "error" not in heard


async def test_a_stream_of_lmtp_that_is_refused_costs_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_limits, "BURST_S", 1.0)
    async with served(tokens_per_s=0.5) as gateway, gateway.lmtp("alice") as socket:
        for command in ("GENERATE", "SCORE", "GENERATE"):
            too_long = {"stream_id": 1, "prompt": [1] * 1000, "scored": [1]}
            await socket.send_str(f"{command} {json.dumps(too_long)}")
            assert "context" in (await socket.receive_str())
        assert (await gateway.ask("alice")).status_code == 200
        check_refusal(await gateway.ask("alice"), "tokens")


async def test_what_a_worker_refuses_a_key_is_told_alike() -> None:
    async with served(worker=CallerLimits(sessions=1)) as gateway:
        with gateway.runner.held():
            first = asyncio.create_task(gateway.ask("alice"))
            await gateway.runner.wait_entered()
            check_refusal(await gateway.ask("alice"), "requests")
            other = asyncio.create_task(gateway.ask("bob"))
        assert {(await answer).status_code for answer in (first, other)} == {200}
