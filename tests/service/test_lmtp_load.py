"""LMTP over a gateway's socket, before a small worker: tokens forwarded, a full queue, killed clients, any frame."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from specsplit.rpc.worker_statistics import StatisticsReader
from tests.support.gateways import GatewayProcess
from tests.support.lmql_client import assert_logprobs, collect, lmql_client
from tests.support.lmtp_fuzz import fuzzed_frame
from tests.support.processes import LIMIT_S, WorkerProcess, environment
from tests.support.rpc_servers import wait_until

IS_FULL = os.environ.get("SPECSPLIT_TEST_ALL") == "1"
NUM_FUZZED = 20_000 if IS_FULL else 300
PROMPT = [100, 200, 300, 400]
CANARY = {"stream_id": 10**6, "prompt": PROMPT, "max_tokens": 24, "temperature": 1, "seed": 9, "ignore_eos": True}
KILLED = """
import asyncio, json, sys, aiohttp
async def main():
    async with aiohttp.ClientSession() as http, http.ws_connect(sys.argv[1]) as socket:
        for number in range(8):
            asked = {"stream_id": number, "prompt": [number + 1], "max_tokens": 400, "ignore_eos": True}
            await socket.send_str("GENERATE " + json.dumps(asked))
        async for message in socket:
            if not message.data.startswith("SYS"):
                print(message.data[:5], flush=True)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Generator[WorkerProcess]:
    options = ("--dtype", "fp32", "--threads", "1", "--context", "512", "--sessions", "2", "--queue", "4")
    started = WorkerProcess("target", tmp_path_factory.mktemp("target"), *options)
    yield started
    started.close()


@pytest.fixture(scope="module")
def gateway(target: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    folder, served = tmp_path_factory.mktemp("gateway"), f"embedded={target.address}"
    started = GatewayProcess(folder, "--target", served, "--mode", "plain", "--lmtp", "127.0.0.1:0")
    yield started
    started.close()


@asynccontextmanager
async def client(gateway: GatewayProcess) -> AsyncGenerator[Any]:
    async with lmql_client(f"http://{gateway.ready['lmtp']}") as made:
        yield made


async def num_forwarded(target: WorkerProcess) -> int:
    """Return how many tokens the target has forwarded."""
    reader = StatisticsReader("target", target.address)
    reading = await reader.read(LIMIT_S)
    await reader.aclose()
    assert reading is not None
    return reading.statistics.steps.num_rows


async def test_a_prompt_that_comes_again_costs_its_new_tokens_alone(
    gateway: GatewayProcess, target: WorkerProcess
) -> None:
    prompt = list(range(1000, 1048))
    ids = list(prompt)
    async with client(gateway) as lmtp:
        whole = await collect(lmtp.generate(prompt, max_tokens=160, ignore_eos=True))
        num_before = await num_forwarded(target)
        ids = [5, *prompt]  # nobody has its rows
        for _ in range(10):
            items = await collect(lmtp.generate(ids, max_tokens=16, ignore_eos=True))
            ids += [item["token"] for item in items]
    assert len(whole) == 160
    assert len(ids) == 1 + len(prompt) + 160
    assert await num_forwarded(target) - num_before <= 160 + len(prompt) + 1


async def test_log_probabilities_without_speculation_are_those_of_transformers(gateway: GatewayProcess) -> None:
    async with client(gateway) as lmtp:
        items = await collect(lmtp.generate(PROMPT, max_tokens=24, top_logprobs=5, ignore_eos=True))
    assert_logprobs(PROMPT, items, num_top=5)


async def test_behind_a_full_queue_the_model_is_described_and_nobody_sent_away(gateway: GatewayProcess) -> None:
    async with client(gateway) as lmtp, aiohttp.ClientSession() as http:

        async def status(max_tokens: int) -> int:
            body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
            async with http.post(f"{gateway.url}/v1/completions", json=body) as answer:
                return answer.status

        with warnings.catch_warnings(record=True) as warned:
            # Two more than slots and queue have room for: who is sent away says that the worker is full.
            others = [asyncio.create_task(status(100)) for _ in range(8)]
            for ended in asyncio.as_completed(others):
                if await ended == 503:
                    break
            streams = [
                asyncio.create_task(collect(lmtp.generate([10 + each], max_tokens=12, ignore_eos=True)))
                for each in range(16)
            ]
            described = await lmtp.request("MODEL_INFO", {})  # which waits for 5 s at most
            assert not all(other.done() for other in others)
            assert not all(stream.done() for stream in streams)
            assert [len(await stream) for stream in streams] == [12] * 16
    assert described["model_info"]["context"] == 512
    said = {str(warning.message) for warning in warned if warning.category is UserWarning}
    assert said == {"Unknown command: SYS"}, "the real client reads over the news of its streams"


async def test_a_client_that_is_killed_frees_its_slots(gateway: GatewayProcess) -> None:
    num_before = await generated(gateway)
    for _ in range(2):  # each takes both slots and the queue
        killed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, f"http://{gateway.ready['lmtp']}", stdout=subprocess.PIPE, env=environment()
        )
        assert killed.stdout is not None
        assert await killed.stdout.readline() == b"TOKEN\n"
        killed.kill()
        await killed.wait()
        async with client(gateway) as lmtp:
            assert len(await collect(lmtp.generate(PROMPT, max_tokens=2, ignore_eos=True))) == 2
    assert await generated(gateway) < num_before + 2 * 8 * 400, "they were ended, not waited for"


async def generated(gateway: GatewayProcess) -> float:
    """Return how many tokens the gateway has sent."""
    async with aiohttp.ClientSession() as http, http.get(f"{gateway.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("specsplit:generation_tokens_total"))


async def test_any_frame_is_answered_and_a_stream_beside_them_unharmed(gateway: GatewayProcess) -> None:
    rng = random.Random(11)
    canaries: list[list[dict[str, Any]]] = []
    others = 0

    async def read(socket: aiohttp.ClientWebSocketResponse) -> None:
        nonlocal others
        async for message in socket:
            kind, _, payload = message.data.partition(" ")
            assert kind in ("TOKEN", "MSG", "SYS")
            for item in json.loads(payload):
                if item.get("stream_id") == CANARY["stream_id"] and kind == "TOKEN":
                    canaries[-1].append(item)
                else:
                    others += 1

    async with aiohttp.ClientSession() as http, http.ws_connect(f"http://{gateway.ready['lmtp']}") as socket:
        reading = asyncio.create_task(read(socket))
        for number in range(NUM_FUZZED):
            if number % 100 == 0:  # the canary's tokens come between those of the frames that follow
                if canaries:
                    await wait_until(lambda: len(canaries[-1]) == 24)
                canaries.append([])
                await socket.send_str(f"GENERATE {json.dumps(CANARY)}")
            await socket.send_str(fuzzed_frame(rng))
        await wait_until(lambda: len(canaries[-1]) == 24)
        assert not reading.done(), "the connection has outlived all of them"
        await socket.close()
        await reading
    assert others > NUM_FUZZED / 4
    assert len({json.dumps(items) for items in canaries}) == 1
    async with client(gateway) as lmtp:
        asked = {name: value for name, value in CANARY.items() if name not in ("stream_id", "prompt")}
        expected = await collect(lmtp.generate(CANARY["prompt"], **asked))
    assert [item["token"] for item in canaries[0]] == [item["token"] for item in expected]
