"""`specsplit serve` on a real socket, used by OpenAI's own client: the text is a Pipeline's, whole and streamed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Generator
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specsplit import Pipeline
from specsplit.core.defaults import EMBEDDED
from specsplit.model.source import resolve
from tests.support.gateways import GatewayProcess
from tests.support.http_fuzz import fuzzed_request
from tests.support.metrics import WITH_THE_FIRST_EVENT, documented, names, samples_of, value
from tests.support.processes import LIMIT_S, run
from tests.support.stage_processes import is_gone

PROMPT = "def add(a, b):\n"
NUM_FUZZED = int(
    os.environ.get("SPECSPLIT_TEST_NUM_FUZZED") or (5_000 if os.environ.get("SPECSPLIT_TEST_ALL") == "1" else 300)
)
"""`make fuzz` sends 50,000."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    statistics = ("--per-request-spec-decode-metrics", "detailed")
    started = GatewayProcess(
        tmp_path_factory.mktemp("gateway"),
        "--dtype",
        "fp32",
        "--context",
        "512",
        "--drain",
        "120",
        *statistics,
        "--metrics-compat",
        "vllm",
    )
    yield started
    started.close()


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def pipeline() -> Generator[Pipeline]:
    with Pipeline(dtype="fp32", context=512) as made:
        yield made


def test_the_text_is_that_of_a_pipeline(client: openai.OpenAI, pipeline: Pipeline) -> None:
    answer = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=40, temperature=0.8, seed=7)
    expected = pipeline.generate(PROMPT, max_new_tokens=40, temperature=0.8, seed=7)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_the_text_is_that_of_the_command_line(client: openai.OpenAI) -> None:
    asked = ("--max-new-tokens", "40", "--temperature", "0.8", "--seed", "7", "--dtype", "fp32", "--context", "512")
    code, text, _ = run("orchestrate", "--prompt", PROMPT, *asked)
    answer = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=40, temperature=0.8, seed=7)
    assert (code, text.removesuffix("\n")) == (0, answer.choices[0].text.removesuffix("\n"))


def test_characters_of_several_tokens_come_whole(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    """At this temperature the tokens are parts of characters, most of which fit no other."""
    asked: Any = {
        "model": "embedded",
        "prompt": "漢字 😀",
        "max_tokens": 60,
        "temperature": 4.0,
        "seed": 1,
        "logprobs": 0,
    }
    whole = client.completions.create(**asked).choices[0]
    stream = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(choice.text for choice in stream) == whole.text
    parts = [token for choice in stream if choice.logprobs for token in choice.logprobs.tokens or []]
    assert whole.logprobs is not None
    assert parts == whole.logprobs.tokens
    broken = [token for token in parts if token.startswith("bytes:")]
    assert broken, "some are"
    raw = b"".join(bytes.fromhex(part[6:].replace("\\x", "")) if part in broken else part.encode() for part in parts)
    assert raw.decode(errors="replace") == whole.text


def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "embedded",
        "messages": [{"role": "user", "content": "class 漢字 😀:\n"}],
        "temperature": 1.0,
    }
    whole = client.chat.completions.create(**options, seed=3, max_completion_tokens=40)
    chunks = list(
        client.chat.completions.create(
            **options, seed=3, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])


async def test_the_asynchronous_client_works_too(gateway: GatewayProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        stream = await client.completions.create(model="embedded", prompt=PROMPT, max_tokens=8, stream=True, seed=1)
        texts = [chunk.choices[0].text async for chunk in stream]
        whole = await client.completions.create(model="embedded", prompt=PROMPT, max_tokens=8, seed=1)
    assert "".join(texts) == whole.choices[0].text


def test_what_a_prompt_shares_with_earlier_ones_is_forwarded_once(client: openai.OpenAI) -> None:
    prompt = "".join(f"def function_{number}(a, b):\n    return a + b + {number}\n\n\n" for number in range(8))
    first, second = [client.completions.create(model="embedded", prompt=prompt, max_tokens=4, n=2).usage for _ in "ab"]
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1, "the last one's logits are needed"


def test_choices_and_batches_are_the_texts_of_single_requests(client: openai.OpenAI) -> None:
    asked: Any = {"model": "embedded", "max_tokens": 12, "temperature": 1.0, "seed": 11}
    batch = client.completions.create(prompt=[PROMPT, "class A:\n"], n=2, **asked)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in batch.choices}) == 4
    for number, prompt in enumerate((PROMPT, "class A:\n")):
        alone = client.completions.create(prompt=prompt, n=2, **asked)
        assert [choice.text for choice in alone.choices] == [
            choice.text for choice in batch.choices[2 * number : 2 * number + 2]
        ]
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(prompt=[PROMPT, "class A:\n"], n=2, stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in batch.choices]


def test_token_ids_continue_as_their_text_does(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    found = httpx.post(f"{gateway.url}/tokenize", json={"model": "embedded", "prompt": PROMPT}).json()
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 512
    asked: Any = {"model": "embedded", "max_tokens": 12, "temperature": 0}
    by_ids = client.completions.create(prompt=found["tokens"], **asked)
    assert by_ids.choices[0].text == client.completions.create(prompt=PROMPT, **asked).choices[0].text
    back = httpx.post(f"{gateway.url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": PROMPT}


def test_it_stops_before_a_stop_string_and_says_so(client: openai.OpenAI) -> None:
    asked: Any = {"model": "embedded", "prompt": PROMPT, "temperature": 0, "max_tokens": 30}
    text = client.completions.create(**asked).choices[0].text
    stop = text[10:14]
    for stream in (False, True):
        answer: Any = client.completions.create(**asked, stop=[stop], stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_echo_and_log_probabilities_are_transformers_own(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="embedded", prompt=PROMPT, max_tokens=16, temperature=0.9, seed=5, echo=True, logprobs=3
    )
    path = resolve(EMBEDDED, "target")[0]
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(PROMPT))
    ids += [_id_of(tokenizer, text) for text in (logprobs.tokens or [])[len(ids) :]]
    with torch.inference_mode():
        exact = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    values = logprobs.token_logprobs or []
    assert values[0] is None
    assert values[1:] == pytest.approx([float(exact[place, ids[place + 1]]) for place in range(len(ids) - 1)], abs=1e-4)
    for place, top in enumerate((logprobs.top_logprobs or [])[1:]):
        assert sorted(top.values())[-3:] == pytest.approx(sorted(exact[place].topk(3).values.tolist()), abs=1e-4)
    text = answer.choices[0].text
    for offset, token in zip(logprobs.text_offset or [], logprobs.tokens or [], strict=True):
        assert text[offset : offset + len(token)] == token


def test_a_prompt_that_is_scored_for_its_echo_was_not_cached(gateway: GatewayProcess) -> None:
    asked = {"prompt": "An echo that nobody sent before: " + PROMPT, "max_tokens": 1, "echo": True, "logprobs": 1}
    usage = httpx.post(f"{gateway.url}/v1/completions", json=asked).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def _id_of(tokenizer: Any, text: str) -> int:
    """Return the token whose text this is; the texts here are those of one token each."""
    ids = [number for number in range(len(tokenizer)) if tokenizer.decode([number]) == text]
    assert len(ids) == 1, text
    return ids[0]


def test_chat_has_log_probabilities_of_every_token(client: openai.OpenAI) -> None:
    asked: Any = {"model": "embedded", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 2}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert b"".join(bytes(token.bytes or []) for token in content).decode() == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in content)
    chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in streamed if part is not None for token in part.content or []] == content


def test_a_prompt_alone_is_scored(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == PROMPT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_trace_tells_what_each_round_drafted(gateway: GatewayProcess) -> None:
    drafting = {"trace": True, "mode": "pingpong"}  # its trees branch, so some of their nodes are rejected
    asked = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True, "speculative": drafting}
    events = _events(httpx.post(f"{gateway.url}/v1/completions", json=asked).text)
    traces = [event["choices"][0]["speculative"] for event in events]
    tokens = [token for trace in traces for token in trace["tokens"]]
    assert "".join(token["text"] for token in tokens) == "".join(event["choices"][0]["text"] for event in events)
    assert len(tokens) == 40
    assert [trace["round"]["number"] for trace in traces] == list(range(len(traces)))
    for event, trace in zip(events, traces, strict=False):
        assert "".join(piece["text"] for piece in trace["pieces"]) == event["choices"][0]["text"]
    for trace in traces[:-1]:  # the last round may be cut at the limit
        drafted = [token["text"] for token in trace["tokens"] if token["drafted"]]
        assert drafted == [node["text"] for node in trace["round"]["nodes"] if node["accepted"]]
        assert len(drafted) == trace["round"]["num_accepted"] <= trace["round"]["num_drafted"]
    assert any(not node["accepted"] for trace in traces for node in trace["round"]["nodes"])
    speculation = events[-1]["metrics"]["speculative_decoding"]
    assert speculation["num_accepted_draft_tokens"] == sum(trace["round"]["num_accepted"] for trace in traces)
    assert sum(speculation["per_step_accepted"]) == speculation["num_accepted_draft_tokens"]


def test_plain_decoding_has_the_same_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "embedded", "prompt": PROMPT, "temperature": 1.0, "seed": 9, "max_tokens": 30}
    texts = {
        client.completions.create(**asked, extra_body={"speculative": {"mode": mode}}).choices[0].text
        for mode in ("plain", "lookup", "pingpong", "overlap", "stream", "auto")
    }
    assert len(texts) == 1


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_curl_works_as_the_readme_says(gateway: GatewayProcess) -> None:
    headers = ("-H", "Content-Type: application/json", "-H", "X-Request-Id: my-own")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 4})
    command = ["curl", "-s", "-D", "-", f"{gateway.url}/v1/completions", *headers, "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    head, _, body = done.stdout.replace("\r", "").partition("\n\n")
    assert "x-request-id: my-own" in head
    assert json.loads(body)["id"] == "cmpl-my-own"


def test_fuzzed_requests_are_never_a_failure_of_the_server(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    canary: Any = {"model": "embedded", "prompt": PROMPT, "max_tokens": 20, "temperature": 0.7, "seed": 4}
    before = client.completions.create(**canary).choices[0].text
    rng, statuses = random.Random(1), set[int]()
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        for _ in range(NUM_FUZZED):
            path, content, headers = fuzzed_request(rng)
            answer = http.post(path, content=content, headers=headers)
            assert answer.status_code < 500, (path, content, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], (path, content)
            statuses.add(answer.status_code)
    assert {200, 400} <= statuses
    assert client.completions.create(**canary).choices[0].text == before


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_page_of_another_site_can_ask_for_nothing(gateway: GatewayProcess, media_type: str) -> None:
    """Browsers send these without asking the server first; what they ask about, it does not allow."""
    body, origin = json.dumps({"prompt": "x", "max_tokens": 1}), {"origin": "http://elsewhere.example"}
    headers = {**origin, "content-type": media_type} if media_type else origin
    refused = httpx.post(f"{gateway.url}/v1/completions", content=body, headers=headers)
    assert refused.status_code == 415
    asks = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    asked = httpx.options(f"{gateway.url}/v1/completions", headers=asks)
    assert asked.status_code == 405
    for answer in (refused, asked, httpx.get(f"{gateway.url}/v1/models", headers=origin)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_responses_are_a_clear_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="There is no /v1/responses here; here it is /v1/chat/"):
        client.responses.create(model="embedded", input="hi")


def test_a_client_without_v1_in_its_address_is_told(gateway: GatewayProcess) -> None:
    refused = httpx.post(f"{gateway.url}/chat/completions", json={}).json()["error"]["message"]
    assert refused == "There is no /chat/completions here; here it is /v1/chat/completions."
    refused = httpx.get(f"{gateway.url}/v1/completions").json()["error"]["message"]
    assert refused == "/v1/completions takes POST, not GET."


def test_a_model_of_another_name_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt-x'; this server has embedded") as caught:
        client.completions.create(model="gpt-x", prompt="hi")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_operators_ask(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    assert gateway.stderr.splitlines()[0] == "Starting the target (embedded) and the draft (embedded) ..."
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert httpx.get(f"{gateway.url}/ready").json() == {"models": ["embedded"]}
    heads = [httpx.head(f"{gateway.url}/{path}") for path in ("health", "ready")]
    assert [(head.status_code, head.content) for head in heads] == [(200, b"")] * 2, "load balancers ask so"
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert "specsplit:spec_decode_num_accepted_tokens_total" in httpx.get(f"{gateway.url}/metrics").text
    assert httpx.get(f"{gateway.url}/version").json().keys() == {"version"}
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    named = set(re.findall(r'"#/components/schemas/([A-Za-z]+)"', json.dumps(document)))
    assert {"CompletionBody", "ChatBody", "Message"} <= named <= document["components"]["schemas"].keys()


def test_prometheus_reads_the_promised_names_and_those_of_vllm(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    drafting = {"ignore_eos": True, "speculative": {"mode": "pingpong"}}
    client.completions.create(model="embedded", prompt=PROMPT, max_tokens=24, extra_body=drafting)
    page = samples_of(httpx.get(f"{gateway.url}/metrics").text)
    for prefix in ("specsplit:", "vllm:"):
        assert value(page, f"{prefix}generation_tokens_total") >= 24
        assert value(page, f"{prefix}num_requests_running") == 0
        assert value(page, f"{prefix}request_success_total", finished_reason="length") >= 1
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
            assert value(page, f"{prefix}{name}_count") >= 1, name
        assert value(page, f"{prefix}spec_decode_num_accepted_tokens_per_pos_total", position="0") >= 1
    assert value(page, "specsplit:round_seconds_count", phase="verify") >= 1
    for link in ("draft", "target"):
        assert value(page, "specsplit:wire_bytes_total", link=link, direction="sent") > 0
    missing = {name for name in documented("gateway") - names(page) if not re.search("audit|quarantined", name)}
    assert missing <= WITH_THE_FIRST_EVENT


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_text_goes_on_after_its_target_was_lost(
    gateway: GatewayProcess, client: openai.OpenAI, number: signal.Signals
) -> None:
    asked: Any = {"model": "embedded", "prompt": PROMPT, "max_tokens": 200, "temperature": 1.0, "seed": 3}
    expected = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    texts: list[str] = []
    for chunk in client.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True):
        if len(texts) == 5:
            os.kill(gateway.worker_pid("target"), number)
        texts.append(chunk.choices[0].text)
    assert "".join(texts) == expected.text
    assert chunk.choices[0].finish_reason == "length"
    assert "The target with its draft ended (signal 9); starting it again" in gateway.stderr


def test_a_drain_lets_a_stream_end_and_ends_the_workers(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    workers = [gateway.worker_pid(role) for role in ("draft", "target")]
    stream = client.completions.create(
        model="embedded", prompt=PROMPT, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    gateway.process.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert gateway.process.wait(LIMIT_S) == 0
    assert all(map(is_gone, workers))
