"""LMTP over the gateway's socket, spoken by LMQL's own client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import lmql
import pytest
import torch
from lmql.models.lmtp.errors import LMTPStreamError
from transformers import AutoModelForCausalLM

from specsplit import Pipeline
from specsplit.core.defaults import EMBEDDED
from specsplit.gateway.keys import new_key
from specsplit.model.source import resolve
from tests.support.forked import ForkedProcess
from tests.support.gateways import GatewayProcess
from tests.support.lmql_client import assert_logprobs, collect, lmql_client
from tests.support.processes import LIMIT_S, WorkerProcess, environment

KEY, LINE = new_key("alice")
AUTHORISED = {"authorization": f"Bearer {KEY}"}
PROMPT = [100, 200, 300, 400]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, WorkerProcess]]:
    folder, options = tmp_path_factory.mktemp("workers"), ("--dtype", "fp32", "--threads", "1", "--context", "512")
    started = {role: WorkerProcess(role, folder, *options) for role in ("target", "draft")}
    yield started
    for worker in started.values():
        worker.close()


@pytest.fixture(scope="module")
def gateway(workers: dict[str, WorkerProcess], tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    links = [part for role, worker in workers.items() for part in (f"--{role}", f"embedded={worker.address}")]
    started = GatewayProcess(tmp_path_factory.mktemp("gateway"), *links, "--lmtp", "127.0.0.1:0")
    yield started
    started.close()


@pytest.fixture(scope="module")
def pipeline() -> Generator[Pipeline]:
    with Pipeline(dtype="fp32", threads=1, context=512) as made:
        yield made


@asynccontextmanager
async def client(gateway: GatewayProcess, **headers: str) -> AsyncGenerator[Any]:
    async with lmql_client(f"{gateway.url}/lmtp", **headers) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_the_text_is_that_of_a_pipeline(gateway: GatewayProcess, pipeline: Pipeline, temperature: float) -> None:
    async with client(gateway) as lmtp:
        items = await collect(lmtp.generate(PROMPT, max_tokens=24, temperature=temperature, seed=5, top_logprobs=3))
    expected = pipeline.generate(PROMPT, max_new_tokens=24, temperature=temperature, seed=5)
    assert tuple(item["token"] for item in items) == expected.token_ids
    assert [item["finish_reason"] for item in items] == [None] * (len(items) - 1) + [expected.finish_reason]
    for item in items:
        first, *rest = item["top_logprobs"].items()
        assert first == (str(item["token"]), item["logprob"])
        assert 2 <= len(rest) <= 3
        assert [value for _, value in rest] == sorted((value for _, value in rest), reverse=True)


async def test_streams_interleave_and_each_keeps_its_order(gateway: GatewayProcess, pipeline: Pipeline) -> None:
    prompts = [[50 + number, 60, 70] for number in range(8)]
    async with client(gateway) as lmtp:
        streams = [
            lmtp.generate(prompt, max_tokens=16, temperature=1.0, seed=number) for number, prompt in enumerate(prompts)
        ]
        found = await asyncio.gather(*map(collect, streams))
    for number, (prompt, items) in enumerate(zip(prompts, found, strict=True)):
        expected = pipeline.generate(prompt, max_new_tokens=16, temperature=1.0, seed=number)
        assert tuple(item["token"] for item in items) == expected.token_ids


async def test_log_probabilities_with_speculation_are_those_of_transformers(gateway: GatewayProcess) -> None:
    async with client(gateway) as lmtp:
        items = await collect(lmtp.generate(PROMPT, max_tokens=24, top_logprobs=5, ignore_eos=True))
    assert_logprobs(PROMPT, items, num_top=5)


async def test_scores_are_those_of_transformers(gateway: GatewayProcess) -> None:
    scored = [11, 22, 33, 44]
    async with client(gateway) as lmtp:
        items = await collect(lmtp.score(PROMPT, scored))
        alone = await collect(lmtp.score([], scored))
    model = AutoModelForCausalLM.from_pretrained(resolve(EMBEDDED, "target")[0], dtype=torch.float32).eval()

    def expected(ids: list[int]) -> list[float]:
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        return [rows[at - 1, ids[at]].item() for at in range(1, len(ids))]

    assert [item["token"] for item in items] == scored
    assert [item["logprob"] for item in items] == pytest.approx(expected([*PROMPT, *scored])[-4:], abs=1e-4)
    assert [item["finish_reason"] for item in items] == [None, None, None, "stop"]
    assert all("top_logprobs" not in item for item in items)
    assert alone[0]["logprob"] == 0.0
    assert [item["logprob"] for item in alone[1:]] == pytest.approx(expected(scored), abs=1e-4)


async def test_a_mask_of_biases_decides_the_token(gateway: GatewayProcess) -> None:
    # LMQL reserves ids behind the vocabulary, and masks them like the others.
    async with client(gateway) as lmtp:
        items = await collect(lmtp.generate(PROMPT, max_tokens=2, logit_bias={"77": 100, "4100": 100}))
    assert [item["token"] for item in items] == [77, 77]


async def test_the_model_is_described(gateway: GatewayProcess) -> None:
    async with client(gateway) as lmtp:
        answer = await lmtp.request("MODEL_INFO", {})
    assert answer["model_info"]["vocab_size"] == 4096
    assert answer["model_info"]["context"] == 512
    assert answer["model_info"]["model"] == "embedded"


async def test_what_is_wrong_ends_its_own_stream_only(gateway: GatewayProcess) -> None:
    async with client(gateway) as lmtp:
        running = asyncio.create_task(collect(lmtp.generate(PROMPT, max_tokens=200, ignore_eos=True)))
        with pytest.raises(LMTPStreamError, match="prompt"):
            await collect(lmtp.generate([None]))
        with pytest.raises(LMTPStreamError, match="vocabulary"):
            await collect(lmtp.generate([5000]))
        with pytest.raises(LMTPStreamError, match="scored"):
            await collect(lmtp.score(PROMPT, []))
        with pytest.raises(LMTPStreamError, match="at most 20"):
            await collect(lmtp.generate(PROMPT, top_logprobs=21))
        lmtp.model_identifier = "another"
        with pytest.raises(LMTPStreamError, match="There is no model 'another'"):
            await collect(lmtp.generate(PROMPT))
        assert len(await running) == 200


@pytest.mark.slow
async def test_a_client_that_leaves_frees_its_slots(gateway: GatewayProcess) -> None:
    for _ in range(3):  # each takes all eight slots
        async with client(gateway) as lmtp:
            streams = [lmtp.generate([10 + each], max_tokens=400, ignore_eos=True) for each in range(8)]
            await asyncio.gather(*(anext(stream) for stream in streams))
    async with client(gateway) as lmtp:
        assert len(await collect(lmtp.generate(PROMPT, max_tokens=2, ignore_eos=True))) == 2


async def test_nobody_is_let_in_without_a_key_or_from_a_foreign_page(
    workers: dict[str, WorkerProcess], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(LINE + "\n", encoding="utf-8")
    target = f"embedded={workers['target'].address}"
    locked = GatewayProcess(tmp_path, "--target", target, "--api-key-file", str(tmp_path / "keys"))
    try:
        for headers in ({}, {"authorization": "Bearer wrong"}, {**AUTHORISED, "origin": "http://elsewhere.example"}):
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                async with client(locked, **headers):
                    pass
        async with client(locked, **AUTHORISED, origin=locked.url) as lmtp:
            assert await lmtp.request("MODEL_INFO", {})
    finally:
        locked.close()


async def test_the_port_of_lmtp_speaks_nothing_else(gateway: GatewayProcess) -> None:
    own = f"http://{gateway.ready['lmtp']}"
    async with aiohttp.ClientSession() as http:
        answer = await http.get(f"{own}/v1/models")
        assert (answer.status, answer.headers["upgrade"]) == (426, "websocket")
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await http.ws_connect(f"{own}/elsewhere")


async def test_a_constrained_query_and_a_distribution_of_lmql(
    gateway: GatewayProcess, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A compiled query adds the folder for temporary files, where anything may lie, to what later tests import from.
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = resolve(EMBEDDED, "target")[0]
    model = lmql.model("embedded", endpoint=gateway.ready["lmtp"], tokenizer=str(folder))
    found = await lmql.run('argmax "def add(a, b):\\n    [BODY]" where len(TOKENS(BODY)) < 8', model=model)
    prompt = pipeline.generate("def add(a, b):\n    ", max_new_tokens=1).prompt_token_ids
    # LMQL puts the token with id 0 before every prompt.
    expected = pipeline.generate([0, *prompt], max_new_tokens=7, temperature=0.0)
    assert found.variables["BODY"] == expected.text
    query = 'argmax "the language is[NAME]" distribution NAME in [" python", " C", " java"]'
    (weighed,) = await lmql.run(query, model=model)
    assert weighed.distribution_values == [" python", " C", " java"]


def test_a_process_speaks_it_over_its_pipes(pipeline: Pipeline) -> None:
    command = ("lmtp", "--stdio", "--dtype", "fp32", "--threads", "1", "--context", "512", "--log-format", "json")
    process = ForkedProcess(
        "specsplit",
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(OMP_NUM_THREADS="1"),
    )
    asked = [
        {"stream_id": each, "prompt": [each, 60], "max_tokens": 12, "seed": 3, "temperature": 1} for each in (1, 2)
    ]
    lines = ["no frame", *(f"GENERATE {json.dumps(each)}" for each in asked)]
    try:
        # Nothing comes after these lines, and both streams are finished all the same.
        output, log = process.communicate("\n".join(lines).encode(), timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0
    said = [json.loads(line)["message"] for line in log.splitlines()]
    assert "LMTP on stdin and stdout: one frame a line." in said
    frames = [line.split(" ", 1) for line in output.decode().splitlines()]
    assert [json.loads(payload) for kind, payload in frames if kind == "SYS"] == [
        [{"status": "loading"}],
        [{"status": "ready", "models": ["embedded"]}],
    ]
    assert [kind for kind, _ in frames[:3]] == ["SYS", "SYS", "MSG"]
    items = [item for kind, payload in frames if kind == "TOKEN" for item in json.loads(payload)]
    for each in (1, 2):
        expected = pipeline.generate([each, 60], max_new_tokens=12, temperature=1.0, seed=3)
        assert tuple(item["token"] for item in items if item["stream_id"] == each) == expected.token_ids
