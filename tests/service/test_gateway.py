"""`specsplit serve` on a real socket, used by OpenAI's own client: the text is a Pipeline's, whole and streamed."""

from __future__ import annotations

from collections.abc import Generator

import httpx2 as httpx
import openai
import pytest

from specsplit import Pipeline
from tests.support.gateways import GatewayProcess

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    started = GatewayProcess(tmp_path_factory.mktemp("gateway"), "--dtype", "fp32", "--context", "512")
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


def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    options = {"model": "embedded", "messages": [{"role": "user", "content": "class 漢字 😀:\n"}], "temperature": 1.0}
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
    assert chunks[-1].usage == whole.usage


async def test_the_asynchronous_client_works_too(gateway: GatewayProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        stream = await client.completions.create(model="embedded", prompt=PROMPT, max_tokens=8, stream=True, seed=1)
        texts = [chunk.choices[0].text async for chunk in stream]
        whole = await client.completions.create(model="embedded", prompt=PROMPT, max_tokens=8, seed=1)
    assert "".join(texts) == whole.choices[0].text


def test_responses_are_a_clear_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="There is no /v1/responses here"):
        client.responses.create(model="embedded", input="hi")


def test_a_model_of_another_name_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt-x'; this server has embedded") as caught:
        client.completions.create(model="gpt-x", prompt="hi")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_operators_ask(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert httpx.get(f"{gateway.url}/ready").json() == {"models": ["embedded"]}
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert "specsplit:spec_decode_num_accepted_tokens_total" in httpx.get(f"{gateway.url}/metrics").text
    assert httpx.get(f"{gateway.url}/version").json().keys() == {"version"}
