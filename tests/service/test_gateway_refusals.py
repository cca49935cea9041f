"""Requests that are refused, over a real socket: before any work for their neighbours, and without costing tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest

from specsplit.core.errors import NoFreeSlot, WorkerUnreachable
from specsplit.core.types import Proposal, Scores, Turn, Verdict
from specsplit.engine import caller_limits
from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.quotas import GatewayQuotas
from specsplit.gateway.server import serving_http
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.language import VOCAB_SIZE, Biases
from tests.support.metrics import samples_of, value

CONTEXT = 64
TOO_LONG = "a" * CONTEXT
LONG = "a" * (CONTEXT - 4)


class CountingTarget(FakeTarget):
    """Counts its work, and fails with `error` if there is one."""

    num_asked = 0
    error: Exception | None = None

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return await super().verify(turn, proposal)

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Biases = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        self.num_asked += 1
        return await super().score(prompt, scored, logit_bias, top_logprobs, keep_for)


class Served:
    """A gateway over a target that counts."""

    def __init__(self, url: str, target: CountingTarget, metrics: Metrics) -> None:
        self.target = target
        self._url, self._metrics = url, metrics

    async def ask(self, prompt: Any, path: str = "completions", **fields: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            asked = {"prompt": prompt} if path == "completions" else {"messages": [{"role": "user", "content": prompt}]}
            return await client.post(f"/v1/{path}", json={"max_tokens": 3, "ignore_eos": True, **asked, **fields})

    @property
    def num_prompt_tokens(self) -> float:
        return value(samples_of(self._metrics.page().decode()), "specsplit:prompt_tokens_total")


@asynccontextmanager
async def served(tokens_per_s: float | None = None) -> AsyncGenerator[Served]:
    target, tokenizer = CountingTarget(context=CONTEXT), FakeTokenizer()
    policy = RetryPolicy(waits_when_full=False, retry_s=0.0)
    orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"), retry_policy=policy)
    model = ServedModel("small", await target.ping(), tokenizer, target, lambda _: orchestrator)
    metrics, quotas = Metrics(models=["small"]), GatewayQuotas(tokens_per_s=tokens_per_s)
    gateway = Gateway(models=ModelTable([model]), version="1", metrics=metrics, quotas=quotas)
    async with serving_http(create_app(gateway), "127.0.0.1", 0) as http:
        yield Served(f"http://{http.address}", target, metrics)
    await orchestrator.aclose()


def check_refusal(answer: httpx.Response, param: str, code: str | None) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_too_long_is_refused_before_any_is_answered(stream: bool) -> None:
    prompts = ["ab"] * 100
    prompts[90] = TOO_LONG
    async with served() as gateway:
        answer = await gateway.ask(prompts, stream=stream)
        check_refusal(answer, "prompt", "context_length_exceeded")
        answer = await gateway.ask(TOO_LONG, "chat/completions", stream=stream)
        check_refusal(answer, "prompt", "context_length_exceeded")
        assert gateway.target.num_asked == 0


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_an_echo_is_checked_before_it_is_scored(max_tokens: int) -> None:
    asked: dict[str, Any] = {"max_tokens": max_tokens, "echo": True, "logprobs": 1}
    async with served() as gateway:
        answer = await gateway.ask(["ab", TOO_LONG + "a"], **asked)
        check_refusal(answer, "prompt", "context_length_exceeded")
        answer = await gateway.ask("ab", logit_bias={str(VOCAB_SIZE): 1}, **asked)
        check_refusal(answer, "logit_bias", None)
        assert gateway.target.num_asked == 0


async def test_a_prompt_alone_may_fill_the_context_and_an_echo_be_longer() -> None:
    async with served() as gateway:
        scored = await gateway.ask(TOO_LONG, max_tokens=0, echo=True, logprobs=1)
        assert scored.status_code == 200
        assert len(scored.json()["choices"][0]["logprobs"]["tokens"]) == CONTEXT
        echoed = await gateway.ask(TOO_LONG * 2, max_tokens=0, echo=True)
        assert echoed.json()["choices"][0]["text"] == TOO_LONG * 2


@pytest.mark.parametrize("error", [NoFreeSlot("full"), WorkerUnreachable("away")], ids=["full", "away"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_counts_when_it_was_read(error: Exception, stream: bool) -> None:
    async with served() as gateway:
        gateway.target.error = error
        assert (await gateway.ask(LONG, stream=stream)).status_code == 503
        assert gateway.num_prompt_tokens == 0
        gateway.target.error = None
        assert (await gateway.ask("abc", stream=stream, n=2)).status_code == 200
        assert gateway.num_prompt_tokens == 6


@pytest.mark.parametrize("error", [None, NoFreeSlot("full"), WorkerUnreachable("away")], ids=["long", "full", "away"])
async def test_what_is_refused_before_any_work_costs_no_tokens(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_limits, "BURST_S", 1.0)
    async with served(tokens_per_s=10.0) as gateway:
        gateway.target.error = error
        for _ in range(3):
            assert (await gateway.ask(LONG if error else TOO_LONG)).status_code in (400, 503)
        gateway.target.error = None
        assert (await gateway.ask(LONG)).status_code == 200
        assert (await gateway.ask("a")).status_code == 429


async def test_a_prompt_that_was_scored_costs_tokens_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_limits, "BURST_S", 1.0)
    async with served(tokens_per_s=10.0) as gateway:
        gateway.target.error = NoFreeSlot("full")
        assert (await gateway.ask(LONG, echo=True, logprobs=1)).status_code == 503
        assert (await gateway.ask("a")).status_code == 429
