"""The asyncio client over fake workers: what it does on its caller's event loop, and what elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Unpack

import pytest

from specsplit import client as clients
from specsplit.assembly.workers import Workers
from specsplit.client import Client, ClientOptions
from specsplit.core.errors import DeadlineExceeded, WorkerClosed
from specsplit.core.settings import Settings
from specsplit.core.types import Scores
from tests.support.fakes import FakeTarget, FakeTokenizer


class SlowTokenizer(FakeTokenizer):
    """It encodes nothing until it is let go on, or much time has passed."""

    def __init__(self) -> None:
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self.was_let_go_on = False

    def encode(self, text: str) -> list[int]:
        self.has_begun.set()
        self.was_let_go_on = self.go_on.wait(60)
        return super().encode(text)


@asynccontextmanager
async def connected(
    tokenizer: FakeTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    target: FakeTarget | None = None,
    **options: Unpack[ClientOptions],
) -> AsyncGenerator[Client]:
    @asynccontextmanager
    async def workers(settings: Settings) -> AsyncGenerator[Workers]:
        made = Workers(target or FakeTarget(), None, tokenizer)
        try:
            yield made
        finally:
            await made.aclose()

    monkeypatch.setattr(clients, "remote_workers", workers)
    async with Client("127.0.0.1:1", mode="plain", max_new_tokens=2, ignore_eos=True, **options) as client:
        yield client


async def test_the_callers_loop_goes_on_while_a_prompt_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SlowTokenizer()
    async with connected(tokenizer, monkeypatch) as client:
        asking = asyncio.create_task(client.generate("ab"))
        await asyncio.to_thread(tokenizer.has_begun.wait)
        tokenizer.go_on.set()
        assert len((await asking).token_ids) == 2
    assert tokenizer.was_let_go_on


async def test_a_requests_time_begins_before_its_prompt_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SlowTokenizer()
    async with connected(tokenizer, monkeypatch) as client:
        asking = asyncio.create_task(client.generate("ab", timeout=0.01))
        await asyncio.to_thread(tokenizer.has_begun.wait)
        ended = asyncio.get_running_loop().time() + 0.02
        asyncio.get_running_loop().call_at(ended, tokenizer.go_on.set)
        with pytest.raises(DeadlineExceeded, match=r"within its 0\.01 s"):
            await asking


async def test_a_request_whose_prompt_is_encoded_as_the_client_closes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SlowTokenizer()
    async with connected(tokenizer, monkeypatch) as client:
        asking = asyncio.create_task(client.generate("ab"))
        await asyncio.to_thread(tokenizer.has_begun.wait)
        await client.aclose()
        tokenizer.go_on.set()
        with pytest.raises(WorkerClosed, match=r"has been closed; make a new one\."):
            await asking


class SilentTarget(FakeTarget):
    async def score(self, *asked: Any) -> Scores:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_score_ends_with_the_timeout_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(FakeTokenizer(), monkeypatch, SilentTarget(), timeout=0.01) as client:
        with pytest.raises(DeadlineExceeded, match=r"within its 0\.01 s"):
            await asyncio.wait_for(client.score([1], [2]), 30)
