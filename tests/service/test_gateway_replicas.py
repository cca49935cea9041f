"""Two targets of one model behind a gateway: one is killed in mid-stream, and no client notices."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from tests.support.gateways import GatewayProcess
from tests.support.processes import WorkerProcess

PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n")
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Generator[list[WorkerProcess]]:
    """A draft, and two targets."""
    started = [
        WorkerProcess(role, tmp_path_factory.mktemp("worker"), "--sessions", "16", "--context", "256")
        for role in ("draft", "target", "target")
    ]
    yield started
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def gateway(workers: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    targets = [part for each in workers[1:] for part in ("--target", f"code={each.address}")]
    draft = ("--draft", f"code={workers[0].address}")
    started = GatewayProcess(tmp_path_factory.mktemp("gateway"), *targets, *draft)
    yield started
    started.close()


class Reader:
    """Reads texts as streams, and counts the chunks that came to all of them."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.num_chunks = 0
        self.num_texts = 0
        self._moved = asyncio.Condition()

    async def read(self, number: int) -> str:
        stream = await self.client.completions.create(
            model="code",
            prompt=PROMPTS[number % len(PROMPTS)],
            max_tokens=NUM_TOKENS,
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        texts, reason = list[str](), None
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
            reason = chunk.choices[0].finish_reason
            await self._count(1)
        assert reason == "length"
        self.num_texts += 1
        return "".join(texts)

    async def _count(self, num_chunks: int) -> None:
        async with self._moved:
            self.num_chunks += num_chunks
            self._moved.notify_all()

    async def wait_chunks(self, count: int) -> None:
        """Wait until `count` more chunks have come."""
        end = self.num_chunks + count
        async with self._moved:
            await self._moved.wait_for(lambda: self.num_chunks >= end)


async def until_ready(gateway: GatewayProcess, number: int) -> None:
    """Wait until so many replicas are ready."""
    async with asyncio.timeout(120), httpx.AsyncClient(base_url=gateway.url) as client:
        while (await client.get("/ready")).json()["replicas"] != {"code": {"ready": number, "of": 2}}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_replica_is_killed_and_every_text_is_the_same(
    gateway: GatewayProcess, workers: list[WorkerProcess]
) -> None:
    reader, victim = Reader(gateway), workers[1]
    expected = [await reader.read(number) for number in range(6)]
    reading = [asyncio.create_task(reader.read(number)) for number in range(6)]
    await reader.wait_chunks(12)
    victim.kill()
    assert await asyncio.gather(*reading) == expected
    await until_ready(gateway, 1)
    assert f"the target at {victim.address} is not used for now" in gateway.stderr
    victim.start()
    assert victim.address
    await until_ready(gateway, 2)
    assert await reader.read(0) == expected[0]


@pytest.mark.slow
async def test_twenty_kills_under_load_lose_no_request(gateway: GatewayProcess, workers: list[WorkerProcess]) -> None:
    reader, num_kinds, has_ended = Reader(gateway), 8, asyncio.Event()
    expected = [await reader.read(number) for number in range(num_kinds)]

    async def keep_reading(start: int) -> None:
        number = start
        while not has_ended.is_set():
            assert await reader.read(number % num_kinds) == expected[number % num_kinds]
            number += 1

    reading = [asyncio.create_task(keep_reading(number)) for number in range(32)]
    for kill in range(20):
        victim = workers[1 + kill % 2]
        await until_ready(gateway, 2)
        await reader.wait_chunks(64)
        victim.kill()
        await reader.wait_chunks(32)
        victim.start()
        await asyncio.to_thread(lambda worker=victim: worker.address)
    has_ended.set()
    await asyncio.gather(*reading)
    assert reader.num_texts >= 32 + num_kinds


def test_targets_that_are_no_replicas_are_one_sentence(workers: list[WorkerProcess], tmp_path: Path) -> None:
    other = WorkerProcess("target", tmp_path, "--context", "128")
    try:
        targets = [part for each in (workers[1], other) for part in ("--target", f"code={each.address}")]
        started = GatewayProcess(tmp_path, *targets)
        assert started.process.wait(120) == 1
        assert "is no replica of the others" in started.stderr
        assert len(started.stderr.strip().splitlines()) == 1
    finally:
        other.close()
