"""What the gateway does before a worker is asked: it encodes on a thread, checks ids, and counts a caller's tokens."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import httpx2 as httpx
import pytest

from specsplit.core.errors import (
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ResourceError,
    SpecSplitError,
    WorkerUnreachable,
)
from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.chat import conversation_ids
from specsplit.gateway.completions import CompletionFormat, make_requests, prompt_ids
from specsplit.gateway.deadline import Deadline
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.quotas import GatewayQuotas
from specsplit.gateway.schemas import ChatBody, CompletionBody
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.virtual_time import run_virtual

CHAT = {"messages": [{"role": "user", "content": "ab"}]}


class SlowTokenizer(FakeTokenizer):
    """Its first text takes until the second one is begun, or a fifth of a second."""

    def __init__(self) -> None:
        self.has_begun, self.has_second = threading.Event(), threading.Event()
        self.had_two_at_once = False

    def encode(self, text: str) -> list[int]:
        if text == "first":
            self.has_begun.set()
            self.had_two_at_once = self.has_second.wait(0.2)
        else:
            self.has_second.set()
        return super().encode(text)


async def served(tokenizer: FakeTokenizer) -> ServedModel:
    target = FakeTarget()
    orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"))
    return ServedModel("small", await target.ping(), tokenizer, target, lambda _: orchestrator)


async def test_a_tokenizer_has_one_thread_though_its_client_has_left() -> None:
    tokenizer = SlowTokenizer()
    model = await served(tokenizer)
    first = asyncio.create_task(model.encode("first"))
    await asyncio.to_thread(tokenizer.has_begun.wait)
    first.cancel()
    assert await model.encode("second") == tokenizer.encode("second")
    assert first.cancelled()
    assert not tokenizer.had_two_at_once


class NotedTokenizer(FakeTokenizer):
    """It notes which thread decodes."""

    thread: threading.Thread | None = None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.thread = threading.current_thread()
        return super().decode(token_ids)


async def test_ids_are_decoded_on_a_thread_within_a_callers_limits() -> None:
    tokenizer = NotedTokenizer()
    quotas = GatewayQuotas(max_requests=1)
    app = create_app(Gateway(models=ModelTable([await served(tokenizer)]), version="1", quotas=quotas))
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/detokenize", json={"tokens": [*b"ab"]})
        assert answer.json() == {"prompt": "ab"}
        assert tokenizer.thread is not threading.current_thread()
        with quotas.answering("127.0.0.1", 0):
            assert (await client.post("/detokenize", json={"tokens": [1]})).status_code == 429


class ClosedTokenizer(FakeTokenizer):
    """It is closed while it encodes."""

    def __init__(self) -> None:
        self.has_begun, self.is_closed = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self.has_begun.set()
        self.is_closed.wait()
        raise ResourceError("The tokenizer was closed.")


async def test_an_error_for_a_client_that_has_left_is_printed_nowhere() -> None:
    loop, tokenizer, printed = asyncio.get_running_loop(), ClosedTokenizer(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: printed.append(context))
    model = await served(tokenizer)
    encoding = asyncio.create_task(model.encode("text"))
    await asyncio.to_thread(tokenizer.has_begun.wait)
    encoding.cancel()
    await asyncio.wait({encoding})
    tokenizer.is_closed.set()
    with pytest.raises(ResourceError):
        await model.encode("text")
    del encoding
    gc.collect()
    assert printed == []


@pytest.mark.parametrize("token_id", [-1, 1 << 12, 1 << 40, 10**30])
async def test_an_id_that_the_model_lacks_is_refused_before_it_is_echoed(token_id: int) -> None:
    model = await served(FakeTokenizer())
    deadline = Deadline.from_now(None)
    assert await prompt_ids(model, CompletionBody(prompt=[[1, 2], "a"]), deadline) == [(1, 2), (97,)]
    with pytest.raises(InvalidRequest, match="outside the vocabulary") as refused:
        await prompt_ids(model, CompletionBody(prompt=[[1], [2, token_id]], max_tokens=0, echo=True), deadline)
    assert refused.value.param == "prompt"


async def test_all_that_is_done_for_a_request_has_one_deadline() -> None:
    body = CompletionBody(prompt="ab", n=2, timeout=5000.0, echo=True, logprobs=0)
    now_s = asyncio.get_running_loop().time()
    for began_s, is_late in ((now_s - 4000.0, False), (now_s - 5000.0, True)):
        model, deadline = await served(FakeTokenizer()), Deadline(body.timeout, began_s)
        requests = make_requests(body, [(1, 2)], 4, None, "", deadline)
        form = CompletionFormat(model, body)
        orchestrator = model.orchestrator(None)
        for work in (
            prompt_ids(model, body, deadline),
            conversation_ids(model, ChatBody.model_validate(CHAT), deadline),
            form.opening(0, requests[0]),
            *map(orchestrator.generate, requests),
        ):
            with pytest.raises(DeadlineExceeded, match="within its 5000 s") if is_late else nullcontext():
                await work


SENT_AWAY = [Overloaded("full", 1.0), ContextExceeded("long"), InvalidRequest("wrong"), WorkerUnreachable("away")]


@pytest.mark.parametrize("error", SENT_AWAY, ids=lambda error: type(error).__name__)
def test_a_request_that_is_sent_away_costs_no_tokens(error: SpecSplitError) -> None:
    quotas = GatewayQuotas(tokens_per_s=1.0)

    def ask(*, is_scored: bool) -> None:
        with quotas.answering("alice", 50) as spend:
            if is_scored:
                spend(0)
            raise error

    for is_scored in (*[False] * 10, True):
        with pytest.raises(type(error)):
            ask(is_scored=is_scored)
    with pytest.raises(Overloaded, match="tokens per second"), quotas.answering("alice", 50):
        pass


def test_the_context_is_that_of_the_last_ping() -> None:
    async def main() -> int:
        model = await served(FakeTokenizer())
        assert isinstance(model.verifier, FakeTarget)
        model.verifier.context = 77  # restarted with another one
        watching = asyncio.create_task(model.watch())
        await asyncio.sleep(5)
        watching.cancel()
        return model.identity.context

    assert run_virtual(main) == 77


@pytest.mark.parametrize("seed", [None, 5, -2])
def test_a_prompt_that_comes_twice_is_sampled_twice_without_a_seed(seed: int | None) -> None:
    body = CompletionBody(prompt=["x", "x"], n=2, seed=seed)
    made = make_requests(body, [(1,), (1,)], 4, None, "", Deadline(None, 0.0))
    first, second = made[:2], made[2:]
    assert [(each.choice, each.seed) for each in first] == [(0, first[0].seed), (1, first[0].seed)]
    assert len({each.seed for each in second}) == 1
    assert (first[0].seed == second[0].seed) == (seed is not None)
    assert seed is None or first[0].seed == seed % (1 << 64)
