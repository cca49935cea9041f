"""A Pipeline over fake workers: what it does on its own thread, and how it ends whoever lets it go."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import pytest

from specsplit import api
from specsplit.api import Pipeline
from specsplit.assembly.arguments import Prompt
from specsplit.assembly.loop_thread import join_ending
from specsplit.assembly.workers import Workers
from specsplit.core.errors import InvalidRequest
from specsplit.core.settings import Settings, load_settings
from specsplit.core.types import Proposal, Turn, Verdict
from tests.support.fakes import FakeTarget, FakeTokenizer

PATIENCE_S = 60.0
"""How long a broken test may hang; a sound one never waits for it."""


def made(
    monkeypatch: pytest.MonkeyPatch,
    target: FakeTarget,
    tokenizer: FakeTokenizer | None = None,
    pool: ThreadPoolExecutor | None = None,
    on_close: Callable[[], object] = bool,
    address: str | None = "127.0.0.1:1",
) -> Pipeline:
    @asynccontextmanager
    async def workers(settings: Settings, models: None) -> AsyncGenerator[Workers]:
        if pool is not None:
            asyncio.get_running_loop().set_default_executor(pool)
        yield Workers(target, None, tokenizer or FakeTokenizer())
        on_close()

    monkeypatch.setattr(api, "open_workers", workers)
    monkeypatch.setattr(api, "load_local", lambda *_, **__: None)
    given = {"target": address, "mode": "plain", "max_new_tokens": 2, "ignore_eos": True}
    return Pipeline.from_settings(load_settings(given).settings)


@contextmanager
def opened(
    monkeypatch: pytest.MonkeyPatch,
    target: FakeTarget,
    tokenizer: FakeTokenizer | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> Generator[Pipeline]:
    with made(monkeypatch, target, tokenizer, pool) as pipeline:
        yield pipeline


class CollectingTarget(FakeTarget):
    """The collector runs in its forwards, as it may wherever objects are made; the second one has no end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_endless = threading.Event()

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        gc.collect()
        if self.num_calls == 1:
            self.num_calls += 1
            self.is_endless.set()
            await asyncio.Event().wait()
        return await super().verify(turn, proposal)


class Reader:
    """An object with a stream and a callback of its own, so that only the collector frees it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.stream = pipeline.stream("ab")
        self.on_token = self.read

    def read(self) -> None:
        next(self.stream)


@pytest.fixture
def no_collector() -> Generator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_stream_collected_on_the_pipelines_thread_ends(monkeypatch: pytest.MonkeyPatch):
    target, texts = CollectingTarget(), list[str]()
    with opened(monkeypatch, target) as pipeline:
        Reader(pipeline).read()
        asking = threading.Thread(target=lambda: texts.append(pipeline.generate("cd").text), daemon=True)
        asking.start()
        asking.join(PATIENCE_S)
        assert len(texts) == 1
        pipeline.close()
    assert not target.slots


def test_a_stream_closed_on_another_thread_ends_for_its_reader(monkeypatch: pytest.MonkeyPatch):
    target, numbers = CollectingTarget(), list[int]()
    with opened(monkeypatch, target) as pipeline:
        stream = pipeline.stream("ab")
        next(stream)
        reading = threading.Thread(target=lambda: numbers.append(len(list(stream))), daemon=True)
        reading.start()
        assert target.is_endless.wait(PATIENCE_S)
        stream.close()
        reading.join(PATIENCE_S)
        assert numbers == [0]
        assert not target.slots
        assert list(stream) == []


def outcome_in_a_fork(work: Callable[[], str]) -> str:
    """Return what `work` returns in a forked process; nothing if that hangs or fails."""
    read, write = os.pipe()
    process_id = os.fork()
    if not process_id:
        try:
            signal.alarm(int(PATIENCE_S))
            os.write(write, work().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(process_id, 0)
    return text


def test_a_pipeline_in_a_forked_process_says_so_and_closes(monkeypatch: pytest.MonkeyPatch):
    with opened(monkeypatch, FakeTarget()) as pipeline:
        begun, later = pipeline.stream("ab"), pipeline.stream("ab")
        next(begun)

        def ask() -> str:
            said: list[str] = []
            calls: list[Callable[[], object]] = [
                lambda: pipeline.generate("ab"),
                lambda: asyncio.run(pipeline.agenerate(["ab", "cd"])),
                lambda: next(begun),
                lambda: next(later),
            ]
            for call in calls:
                with pytest.raises(InvalidRequest) as caught:
                    call()
                said.append(str(caught.value))
            begun.close()
            pipeline.close()
            return "|".join(said)

        sentence = "This pipeline was made in another process, before a fork; make a new one here."
        assert outcome_in_a_fork(ask).split("|") == [sentence] * 4
        assert len(list(begun)) == 1
        assert len(pipeline.generate("ab").token_ids) == 2


def threads_of_pipelines() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "specsplit-pipeline"}


class ElsewhereTarget(FakeTarget):
    """It tells which loop it runs on."""

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.loop = asyncio.get_running_loop()
        return await super().verify(turn, proposal)


def collect_until_ended(thread: threading.Thread) -> bool:
    """Collect again and again, since a request that is cancelled meanwhile holds its pipeline for a moment."""
    end_s = time.monotonic() + PATIENCE_S
    while thread.is_alive() and time.monotonic() < end_s:
        gc.collect()
        thread.join(0.01)
    return not thread.is_alive()


@pytest.mark.parametrize("is_under_way", [False, True], ids=["idle", "under way"])
def test_a_dropped_pipeline_is_closed(is_under_way: bool, monkeypatch: pytest.MonkeyPatch):
    target, left, slots = CollectingTarget(), threads_of_pipelines(), list[int]()
    pipeline = made(monkeypatch, target, on_close=lambda: slots.append(len(target.slots)))
    stream = pipeline.stream("ab")
    if is_under_way:
        next(stream)
        assert target.is_endless.wait(PATIENCE_S)
    (thread,) = threads_of_pipelines() - left
    del pipeline, stream
    assert collect_until_ended(thread)
    assert slots == [0]


def test_a_pipeline_dropped_on_its_own_thread_is_closed(monkeypatch: pytest.MonkeyPatch):
    target, left = ElsewhereTarget(), threads_of_pipelines()
    held = [made(monkeypatch, target)]
    held[0].generate("ab")
    (thread,) = threads_of_pipelines() - left
    target.loop.call_soon_threadsafe(held.clear)
    assert collect_until_ended(thread)
    assert target.loop.is_closed()


def test_a_pipeline_dropped_in_a_forked_process_stays_with_its_own(monkeypatch: pytest.MonkeyPatch):
    held = [made(monkeypatch, FakeTarget())]

    def drop() -> str:
        held.clear()
        gc.collect()
        join_ending()
        return "dropped"

    assert outcome_in_a_fork(drop) == "dropped"
    assert len(held[0].generate("ab").token_ids) == 2
    held[0].close()


def test_the_interpreters_end_waits_for_a_pipeline_dropped_before(monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()
    left = threads_of_pipelines()
    pipeline = made(monkeypatch, FakeTarget(), on_close=lambda: go_on.wait(PATIENCE_S))
    (thread,) = threads_of_pipelines() - left
    del pipeline
    gc.collect()
    assert thread.is_alive()
    go_on.set()
    join_ending()
    assert not thread.is_alive()


class WaitingTokenizer(FakeTokenizer):
    """It takes one text only when it is let go on, or much time has passed, and notes who encodes the others."""

    def __init__(self) -> None:
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self.was_let_go_on = False
        self.on_loop: list[bool] = []

    def encode(self, text: str) -> list[int]:
        if "slow" in text:
            self.has_begun.set()
            self.was_let_go_on = self.go_on.wait(PATIENCE_S)
            return super().encode("slow")
        self.on_loop.append(threading.current_thread() in threads_of_pipelines())
        return super().encode(text)


SLOW: dict[str, tuple[str | None, Prompt]] = {
    "elsewhere": ("127.0.0.1:1", "slow"),
    "a long text here": (None, "slow" * 1000),
    "a conversation here": (None, [{"role": "user", "content": "slow"}]),
}


@pytest.mark.parametrize("name", SLOW)
def test_other_requests_go_on_while_a_tokenizer_works(name: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer, (address, prompt) = WaitingTokenizer(), SLOW[name]
    with made(monkeypatch, FakeTarget(), tokenizer, address=address) as pipeline:
        asking = threading.Thread(target=pipeline.generate, args=[prompt], daemon=True)
        asking.start()
        assert tokenizer.has_begun.wait(PATIENCE_S)
        assert len(pipeline.generate("ab").token_ids) == 2
        tokenizer.go_on.set()
        asking.join(PATIENCE_S)
    assert tokenizer.was_let_go_on
    assert tokenizer.on_loop == [False], "nobody waits on the loop for a tokenizer at work"


def test_a_short_text_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch):
    tokenizer = WaitingTokenizer()
    with made(monkeypatch, FakeTarget(), tokenizer, address=None) as pipeline:
        pipeline.generate("ab")
    assert tokenizer.on_loop == [True]


def test_a_thread_that_outlives_the_main_one_goes_on_generating(monkeypatch: pytest.MonkeyPatch):
    """Every pool of threads has ended by then."""
    pool = ThreadPoolExecutor()
    pool.shutdown()
    with opened(monkeypatch, FakeTarget(), pool=pool) as pipeline:
        assert len(pipeline.generate("ab").token_ids) == 2


class CrowdedTarget(FakeTarget):
    """A target that counts its sessions."""

    most = 0

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        verdict = await super().verify(turn, proposal)
        self.most = max(self.most, len(self.slots))
        return verdict


@pytest.mark.parametrize("is_async", [False, True])
def test_a_long_list_does_not_reach_a_target_elsewhere_at_once(monkeypatch: pytest.MonkeyPatch, is_async: bool):
    target = CrowdedTarget()
    prompts = [f"number {number}" for number in range(300)]
    with opened(monkeypatch, target) as pipeline:
        results = asyncio.run(pipeline.agenerate(prompts, seed=1)) if is_async else pipeline.generate(prompts, seed=1)
        assert len(results) == 300
        assert results[-1].token_ids == pipeline.generate(prompts[-1], seed=1).token_ids
    assert 16 < target.most < 200
