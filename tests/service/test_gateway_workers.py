"""A draft and two targets of one model behind a gateway: targets that are killed, clients that leave or say nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from tests.support.gateways import GatewayProcess
from tests.support.metrics import scraped, value
from tests.support.processes import WorkerProcess

PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n")
NUM_TOKENS = 60
FREED_S = 60.0
"""A slot is freed within a second of a disconnect on a machine that has nothing else to do."""
LONG_PROMPT = "x = 1\n" * 700


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Generator[list[WorkerProcess]]:
    """A draft, and two targets."""
    started = [
        WorkerProcess(role, tmp_path_factory.mktemp("worker"), "--sessions", "16")
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
        started = GatewayProcess(tmp_path, *targets, "--mode", "plain")
        assert started.process.wait(120) == 1
        assert "is no replica of the others" in started.stderr
        assert len(started.stderr.strip().splitlines()) == 1
    finally:
        other.close()


class Loads:
    """Asks workers how many sessions they have."""

    def __init__(self, workers: list[WorkerProcess]) -> None:
        clients = {"draft": RemoteDrafter, "target": RemoteVerifier}
        self._clients = [clients[each.role](each.address, call_timeout_s=60) for each in workers]

    async def counts(self) -> list[int]:
        details = [await client.ping_details() for client in self._clients]
        return [each.load.num_slots - each.load.num_free_slots for each in details]

    async def until(self, *, is_busy: bool, limit_s: float = 120) -> None:
        """Wait until a slot is in use, or none is."""
        async with asyncio.timeout(limit_s):
            while any(await self.counts()) != is_busy:  # noqa: ASYNC110  (no worker tells when a slot is freed)
                await asyncio.sleep(0.02)

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()


@asynccontextmanager
async def loads_of(workers: list[WorkerProcess]) -> AsyncGenerator[Loads]:
    loads = Loads(workers)
    try:
        yield loads
    finally:
        await loads.aclose()


async def begin(
    gateway: GatewayProcess, *, missing: int = 0, **body: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request of whose body the last `missing` bytes do not come; nothing is read."""
    content = json.dumps({"model": "code", "ignore_eos": True, **body}).encode()
    host, port = gateway.ready["address"].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content[: len(content) - missing])
    await writer.drain()
    return reader, writer


async def num_whole_answers(gateway: GatewayProcess) -> float:
    page = await asyncio.to_thread(scraped, gateway.ready["address"])
    return value(page, "specsplit:request_success_total", finished_reason="length")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("prompt", ["x = 1\n", LONG_PROMPT], ids=["decoding", "prefill"])
async def test_a_client_that_leaves_frees_the_slots_of_all_workers(
    gateway: GatewayProcess, workers: list[WorkerProcess], prompt: str, *, stream: bool
) -> None:
    async with loads_of(workers) as loads:
        await loads.until(is_busy=False)
        num_ended = await num_whole_answers(gateway)
        max_tokens = 3000 if prompt != LONG_PROMPT else 400  # far more than are generated until its client is missed
        reader, writer = await begin(gateway, prompt=prompt, stream=stream, max_tokens=max_tokens)
        if stream and prompt != LONG_PROMPT:
            await reader.readuntil(b"data: ")
        await loads.until(is_busy=True)
        writer.close()
        await loads.until(is_busy=False, limit_s=FREED_S)
        assert await num_whole_answers(gateway) == num_ended, "it ended since its client left"


@pytest.mark.slow
async def test_clients_that_leave_in_every_phase_leave_no_slot(
    gateway: GatewayProcess, workers: list[WorkerProcess]
) -> None:
    rng = random.Random(5)

    async def leave() -> None:
        missing = rng.choice((0, 0, 0, 5))
        prompt = rng.choice((LONG_PROMPT, "x = 1\n"))
        reader, writer = await begin(
            gateway, prompt=prompt, stream=rng.random() < 0.5, max_tokens=50, n=rng.choice((1, 3)), missing=missing
        )
        for _ in range(0 if missing else rng.randrange(4)):
            if not await reader.read(100):
                break
        writer.close()

    async with loads_of(workers) as loads:
        for _ in range(25):
            await asyncio.gather(*(leave() for _ in range(8)))
        await loads.until(is_busy=False)


async def test_a_thousand_silent_connections_keep_nobody_out(gateway: GatewayProcess) -> None:
    reader = Reader(gateway)
    expected = await reader.read(0)
    host, port = gateway.ready["address"].rsplit(":", 1)
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(1000)]
    slow = [await begin(gateway, prompt="x", missing=2) for _ in range(50)]
    assert await reader.read(0) == expected
    for _, writer in (*idle, *slow):
        writer.close()


@pytest.mark.slow
async def test_a_stage_is_killed_and_the_text_goes_on_or_ends_with_an_error(tmp_path: Path) -> None:
    target = WorkerProcess("target", tmp_path, "--local-stages", "2")
    gateway = None
    try:
        gateway = GatewayProcess(tmp_path, "--target", f"code={target.address}")
        reader = Reader(gateway)
        expected = await reader.read(0)
        reading = asyncio.create_task(reader.read(0))
        await reader.wait_chunks(5)
        lines = [line for line in target.stderr.splitlines() if ", process " in line]
        os.kill(int(lines[-1].rstrip(".").rpartition(" ")[2]), signal.SIGKILL)
        try:
            assert await reading == expected
        except openai.APIError as error:
            assert error.code == "model_unavailable"  # noqa: PT017  (either is right)
    finally:
        if gateway is not None:
            gateway.close()
        target.close()
