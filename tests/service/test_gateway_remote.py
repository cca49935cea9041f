"""A gateway before a worker elsewhere with one slot: keys, refusals, clients that leave, and a target that is lost."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from specsplit.gateway.keys import new_key
from tests.support.forked import ROOT
from tests.support.gateways import GatewayProcess
from tests.support.metrics import names, samples_of, scraped, value
from tests.support.processes import LIMIT_S, WorkerProcess, run

KEY, LINE = new_key("alice")
LONG = {"prompt": "x = 1\n", "max_tokens": 3000, "ignore_eos": True}
SHORT = {"prompt": "x = 1\n", "max_tokens": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Generator[WorkerProcess]:
    started = WorkerProcess("target", tmp_path_factory.mktemp("target"), "--sessions", "1", "--queue", "0")
    yield started
    started.close()


@pytest.fixture(scope="module")
def gateway(target: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "keys").write_text(LINE + "\n", encoding="utf-8")
    keys = ("--api-key-file", str(folder / "keys"))
    beside = ("--health", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    named = ("--target", target.address, "--served-name", "small", "--retry", "1")
    started = GatewayProcess(folder, *named, *keys, *beside)
    yield started
    started.close()


@pytest.fixture
def client(gateway: GatewayProcess) -> Generator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=60) as made:
        yield made


def until_answered(client: httpx.Client) -> dict[str, Any]:
    """Ask until the only slot is free."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        answer = client.post("/v1/completions", json=SHORT)
        if answer.status_code == 200:
            return answer.json()
        assert answer.status_code == 503, answer.text
    raise AssertionError("the slot was never freed")


def test_a_token_ends_an_answer(client: httpx.Client) -> None:
    prompt, num_new = SHORT["prompt"], 20
    asked = {"prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    text = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    ids = client.post("/tokenize", json={"prompt": f"{prompt}{text}"}).json()["tokens"]
    stop = ids[-5]
    place = ids.index(stop, len(ids) - num_new) - (len(ids) - num_new)
    ended = client.post("/v1/completions", json={**asked, "stop_token_ids": [stop]}).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == place + 1
    assert text.startswith(ended["choices"][0]["text"])
    beyond = client.post("/v1/completions", json={**asked, "stop_token_ids": [10**6]})
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "stop_token_ids")


def test_ids_tell_what_the_chat_template_made(client: httpx.Client) -> None:
    marked = "<|endoftext|>def a<|endoftext|>"
    ids = client.post("/tokenize", json={"prompt": marked}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": marked}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, it"}]
    ids = client.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith("Well, it")
    asked = {"max_tokens": 5, "temperature": 0}
    going_on = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    chat = client.post("/v1/chat/completions", json={**asked, **going_on}).json()
    completion = client.post("/v1/completions", json={**asked, "prompt": ids}).json()
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]


def test_nobody_is_let_in_without_a_key(gateway: GatewayProcess, client: httpx.Client) -> None:
    for path in ("/v1/models", "/metrics", "/nowhere"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            refused = httpx.get(f"{gateway.url}{path}", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "small", "the name that --served-name gives it"


def test_probes_and_prometheus_have_ports_that_need_no_key(gateway: GatewayProcess, client: httpx.Client) -> None:
    until_answered(client)
    page, own = scraped(gateway.ready["metrics"]), client.get("/metrics").text
    assert names(page) == names(samples_of(own))
    assert value(page, "specsplit:generation_tokens_total", model_name="small") >= SHORT["max_tokens"]
    health, metrics = (f"http://{gateway.ready[name]}" for name in ("health", "metrics"))
    assert httpx.get(f"{health}/health").status_code == 200
    assert httpx.get(f"{health}/ready").json() == {"models": ["small"]}
    for url in (health, metrics):  # they serve nothing else
        for path in ("/v1/models", "/openapi.json", "/"):
            assert httpx.get(f"{url}{path}").status_code == 404, (url, path)
        assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 404


def test_a_full_target_is_a_503_that_says_when_to_come_back(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        for body in (SHORT, {**SHORT, "stream": True}):
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_overloaded"
            assert int(refused.headers["retry-after"]) >= 1
    until_answered(client)


def counted(client: httpx.Client, name: str) -> float:
    """Return a metric of the model."""
    page = client.get("/metrics").text
    found = [line for line in page.splitlines() if line.startswith(f'specsplit:{name}{{model_name="small"}} ')]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("prompt", "phase"), [("x = 1\n", "running"), ("x = 1\n" * 700, "waiting")])
def test_a_client_that_leaves_frees_its_slot(
    gateway: GatewayProcess, client: httpx.Client, *, stream: bool, prompt: str, phase: str
) -> None:
    until_answered(client)
    num_tokens = counted(client, "generation_tokens_total")
    content = json.dumps({**LONG, "prompt": prompt, "stream": stream, "max_tokens": 400}).encode()
    host, port = gateway.ready["address"].rsplit(":", 1)
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Authorization: Bearer {KEY}",
        f"Content-Length: {len(content)}",
    )
    with socket.create_connection((host, int(port))) as leaving:
        leaving.sendall("\r\n".join((*lines, "", "")).encode() + content)
        end_s = time.monotonic() + LIMIT_S
        while counted(client, f"num_requests_{phase}") != 1:
            assert time.monotonic() < end_s
    until_answered(client)
    assert counted(client, "generation_tokens_total") < num_tokens + 400, "it was ended, not waited for"


def test_a_target_that_is_lost_is_one_event_and_the_end(target: WorkerProcess, client: httpx.Client) -> None:
    until_answered(client)
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        target.kill()
        rest = [line for line in lines if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in rest]
    assert [event["error"]["code"] for event in events if "error" in event] == ["model_unavailable"]
    assert "error" in events[-1], "and nothing pretends that the text came to its end"
    refused = client.post("/v1/completions", json=SHORT)
    assert refused.status_code == 503
    while client.get("/ready").status_code == 200:
        pass
    assert client.get("/v1/models").json()["data"] == []
    lost = client.get("/v1/models/small")
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "model_unavailable")
    target.start()
    assert target.address
    until_answered(client)
    while client.get("/ready").status_code != 200:
        pass


def test_a_new_key_is_printed_once_apart_from_its_line() -> None:
    code, line, said = run("keys", "new", "bob")
    key = said.rpartition(" ")[2].strip()
    assert code == 0
    assert line.startswith("bob:")
    assert key not in line
    assert hashlib.sha256(key.encode()).hexdigest() in line


def test_its_process_has_no_torch(target: WorkerProcess, tmp_path: Path) -> None:
    started = GatewayProcess(tmp_path, "--target", target.address, tree=ROOT)
    try:
        assert started.ready["models"]
        libraries = Path(f"/proc/{started.process.pid}/maps").read_text(encoding="utf-8")
        assert "grpc" in libraries
        assert "libtorch" not in libraries
    finally:
        started.close()


def test_it_listens_for_others_only_with_keys() -> None:
    code, _, said = run("serve", "--http", "0.0.0.0:0", "--target", "127.0.0.1:1")
    assert code == 2
    assert "--api-key-file" in said
    assert "--allow-anonymous" in said


def test_contradictions_are_one_sentence(tmp_path: Path) -> None:
    for arguments, said in (
        (("--target", "a:1", "--target-model", "x"), "leave one out"),
        (("--target", "x=a:1", "--target", "x=a:1"), "x stands twice with the same address"),
        (("--target", "a:1", "--target", "a:2"), "or replicas of one model the same"),
        (("--target", "x=a:1", "--draft", "x=a:2", "--draft", "x=a:3"), "the replicas of a target share one"),
        (("--target", "x=a:1", "--target", "y=a:2", "--draft", "a:3"), "write --draft NAME=HOST:PORT"),
        (("--target", "x=a:1", "--draft", "y=a:3"), "no target called y"),
        (("--target", "nowhere"), "HOST:PORT"),
        (("--api-key-file", str(tmp_path / "none")), "cannot be read"),
    ):
        code, _, error = run("serve", "--http", "127.0.0.1:0", *arguments)
        assert code == 2, (arguments, error)
        assert said in error
        assert len(error.strip().splitlines()) == 1
