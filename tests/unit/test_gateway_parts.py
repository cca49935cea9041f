"""Parts of the gateway that need no server: strict JSON, schemas, keys, statistics, errors."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import Request
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_parameters
from pydantic import AfterValidator

from specsplit.core import errors
from specsplit.core.errors import InvalidSettings, Overloaded, SpecSplitError
from specsplit.core.types import Proposal, Verdict
from specsplit.gateway import body
from specsplit.gateway.body import strict_json, validated
from specsplit.gateway.errors import ApiError, api_error
from specsplit.gateway.keys import KeyFile, new_key
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.other_servers import our_path
from specsplit.gateway.schemas import Body, ChatBody, CompletionBody, StreamOptions
from specsplit.gateway.statistics import SpeculationRecord
from specsplit.gateway.tokenization_bodies import TokenizeBody
from specsplit.limits import SMALL_BYTES
from specsplit.orchestrator.request import RoundFacts
from tests.support.metrics import samples_of, value

MESSAGES = [{"role": "user", "content": "hi"}]
JSON_TYPE = [(b"content-type", b"application/json")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b'{"a": {"b": 1, "b": 1}}', "stands twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\\ud800"}', "half a character"),
        (b'{"\\uDfff": 1}', "half a character"),
        (b'{"a": "\xed\xa0\x80"}', "not valid JSON"),
        ('{"a": "\\ud800"}'.encode("utf-16"), "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"9" * 5000, "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"", "not valid JSON"),
    ],
)
def test_what_is_no_strict_json_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        strict_json(content)
    assert caught.value.status == 400


def test_a_body_nested_too_deeply_is_refused_at_every_depth() -> None:
    """Halves of characters are looked for by a function that goes deeper than the one that reads."""
    limit = sys.getrecursionlimit()
    for depth in range(limit // 2, limit + 10):
        with pytest.raises(ApiError, match=r"half a character|nested too deeply"):
            strict_json(b'{"a": ' + b"[" * depth + b'"\\ud800"' + b"]" * depth + b"}")


def test_whole_characters_in_escapes_are_taken() -> None:
    assert strict_json(b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}') == {"a": "\N{GRINNING FACE}", "b": "\\ud800"}


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.01)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    request = Request({"type": "http", "method": "POST", "headers": JSON_TYPE}, receive)
    with pytest.raises(ApiError, match="did not come within") as caught:
        await body.read_body(request, CompletionBody, 100)
    assert (caught.value.status, caught.value.headers) == (408, {"connection": "close"})


THREADS: list[threading.Thread] = []


def _noted(text: str) -> str:
    THREADS.append(threading.current_thread())
    return text


class NotedBody(Body):
    """A body that notes who reads it."""

    text: Annotated[str, AfterValidator(_noted)]


async def test_a_large_body_does_not_hold_up_the_answers_to_others() -> None:
    async def read(text: str) -> Body:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps({"text": text}).encode()}

        return await body.read_body(Request({"type": "http", "headers": JSON_TYPE}, receive), NotedBody, 1 << 20)

    THREADS.clear()
    assert await read("a") == NotedBody(text="a")
    assert await read("a" * SMALL_BYTES) == NotedBody(text="a" * SMALL_BYTES)
    small, _, large, _ = THREADS
    assert small is threading.current_thread()
    assert large is not small
    with pytest.raises(ApiError, match="half a character"):
        await read("a" * SMALL_BYTES + "\ud800")


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("best_of", {"prompt": "x", "best_of": 2}),
    ("suffix", {"prompt": "x", "suffix": "y"}),
    ("tools", {"messages": MESSAGES, "tools": [{"type": "function"}]}),
    ("tool_choice", {"messages": MESSAGES, "tool_choice": "required"}),
    ("response_format", {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
    ("modalities", {"messages": MESSAGES, "modalities": ["audio"]}),
    ("audio", {"messages": MESSAGES, "audio": {"voice": "x"}}),
    ("store", {"messages": MESSAGES, "store": True}),
    ("min_tokens", {"prompt": "x", "min_tokens": 1}),
    ("guided_json", {"messages": MESSAGES, "guided_json": {}}),
    ("chat_template", {"messages": MESSAGES, "chat_template": "{{ messages }}"}),
    ("tool_calls", {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}),
    ("include_obfuscation", {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}}),
    ("prompt_cache_retention", {"messages": MESSAGES, "prompt_cache_retention": "24h"}),
]


@pytest.mark.parametrize(("name", "fields"), UNSUPPORTED, ids=[name for name, _ in UNSUPPORTED])
def test_what_is_not_supported_is_refused_by_name(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"^{name} is not supported") as caught:
        validated(ChatBody if "messages" in fields else CompletionBody, fields)
    assert (caught.value.param, caught.value.code) == (name, "unsupported")


def test_what_asks_for_nothing_is_taken() -> None:
    nothing: dict[str, Any] = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False}
    empty: dict[str, Any] = dict.fromkeys(("stop", "seed", "n", "logit_bias", "temperature", "stream", "max_tokens"))
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    nothing |= {"top_logprobs": 0, "logprobs": False, "prompt_cache_retention": "in_memory"}
    chat = validated(ChatBody, {"messages": [message, *MESSAGES], **nothing, **empty})
    assert chat.sampling().temperature == 1.0, "as in OpenAI's API"
    of_vllm: dict[str, Any] = {
        "best_of": 1,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "length_penalty": 1.0,
        "stop_token_ids": [],
    }
    assert validated(CompletionBody, {"prompt": "x", **of_vllm, "response_format": None}).prompt == ["x"]


def test_a_message_may_have_a_name_of_64_characters() -> None:
    named = validated(ChatBody, {"messages": [{**MESSAGES[0], "name": "n" * 64}, {**MESSAGES[0], "name": None}]})
    assert [message.for_template() for message in named.messages] == [{**MESSAGES[0], "name": "n" * 64}, MESSAGES[0]]
    for name, said in (("n" * 65, "must have at most 64 characters"), (5, "must be a text")):
        with pytest.raises(ApiError, match=said) as caught:
            validated(ChatBody, {"messages": [{**MESSAGES[0], "name": name}]})
        assert (caught.value.status, caught.value.param) == (400, "messages.0.name")


def test_variables_of_the_template_are_taken_without_those_that_are_null() -> None:
    given = {"enable_thinking": False, "thinking_budget": 512, "effort": "high", "temperature": 0.5, "nothing": None}
    for schema in (ChatBody, TokenizeBody):
        found = validated(schema, {"messages": MESSAGES, "chat_template_kwargs": given}).chat_template_kwargs
        assert found == {name: value for name, value in given.items() if value is not None}
        assert found["enable_thinking"] is False
        assert validated(schema, {"messages": MESSAGES, "chat_template_kwargs": None}).chat_template_kwargs == {}
    both = {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}
    assert validated(ChatBody, both).template_variables == {"a": 1, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs", "must have true or false, a number or a text"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "must not have tools, which only the server"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "must not have bos_token"),
        ({"enable_thinking": False}, "enable_thinking", "; here it is chat_template_kwargs.enable_thinking.$"),
        ({"reasoning_effort": "fast"}, "reasoning_effort", "must be none, minimal, low"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            None,
            "has reasoning_effort twice",
        ),
    ],
)
def test_wrong_variables_are_one_sentence(fields: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        validated(ChatBody, {"messages": MESSAGES, **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_prompt_to_tokenize_has_no_variables() -> None:
    with pytest.raises(ApiError, match="are for messages"):
        validated(TokenizeBody, {"prompt": "x", "chat_template_kwargs": {"a": 1}})


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/completion", "/v1/completions"),
        ("/healthz", "/health"),
        ("/v1/embeddings", None),
        ("/", None),
    ],
)
def test_a_path_of_other_servers_is_answered_with_ours(path: str, ours: str | None) -> None:
    known = ["/", "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health"]
    assert our_path(path, known) == ours


def test_every_field_of_openais_client_is_taken_or_refused_by_name() -> None:
    for parameters, schema in (
        (completion_create_params.CompletionCreateParamsBase, CompletionBody),
        (chat_parameters.CompletionCreateParamsBase, ChatBody),
        (ChatCompletionStreamOptionsParam, StreamOptions),
    ):
        names = set(parameters.__annotations__)
        assert len(names) > 1
        assert names <= schema.model_fields.keys() | schema.unsupported.keys(), schema


@pytest.mark.parametrize(
    ("asked", "of_vllm", "wrong"),
    [
        ({"prompt": "x"}, {"add_special_tokens": True, "return_token_strs": False}, {"add_special_tokens": False}),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            {"add_special_tokens": False, "add_generation_prompt": True, "continue_final_message": False},
            {"add_special_tokens": True},
        ),
    ],
    ids=["prompt", "messages"],
)
def test_clients_of_vllm_may_tokenize(asked: dict[str, Any], of_vllm: dict[str, Any], wrong: dict[str, Any]) -> None:
    assert validated(TokenizeBody, {**asked, **of_vllm}) == validated(TokenizeBody, asked)
    with pytest.raises(ApiError, match="add_special_tokens is not supported"):
        validated(TokenizeBody, {**asked, **wrong})


def test_the_text_parts_of_a_message_are_lines() -> None:
    for texts in (["one"], ["one", "", "two\n", "three"]):
        content = [{"type": "text", "text": text} for text in texts]
        (message,) = validated(ChatBody, {"messages": [{"role": "user", "content": content}]}).messages
        assert message.for_template()["content"] == "\n".join(texts)


WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": "x", "temperature": "1"}, "temperature", "must be a number"),
    ({"prompt": "x", "temperature": True}, "temperature", "must be a number"),
    ({"prompt": "x", "max_tokens": 1.0}, "max_tokens", "must be a whole number"),
    ({"prompt": "x", "max_tokens": 0}, None, "needs echo"),
    ({"prompt": [1, "x"]}, "prompt", "a list of texts"),
    ({"prompt": [1, True]}, "prompt", "a list of texts"),
    ({"prompt": ["x"] * 65, "n": 2}, None, "more than 128 answers"),
    ({"prompt": "x", "stop": [1]}, "stop", "must be a text"),
    ({"prompt": "x", "logit_bias": {"1.5": 1}}, "logit_bias", "token ids"),
    ({"prompt": "x", "logit_bias": {"5": 1, "05": 2}}, "logit_bias", "token ids"),
    ({"prompt": "x", "logit_bias": {"5": 10**400}}, "logit_bias", "token ids"),
    ({"prompt": "x", "seed": 1 << 64}, "seed", "must be below"),
    ({"prompt": "x", "speculative": {"trace": 1}}, "speculative.trace", "must be true or false"),
    ({"prompt": "x", "tempreature": 1}, "tempreature", "is not a field of this request.$"),
    ({"prompt": "x", "n_predict": 1}, "n_predict", "is not a field of this request; here it is max_tokens.$"),
    ({"prompt": "x", "enable_thinking": False}, "enable_thinking", "is not a field of this request.$"),
    ({"content": "x", "prompt": "x"}, "content", "is not a field of this request; here it is prompt.$"),
    ({}, "prompt", "is missing"),
]


@pytest.mark.parametrize(("fields", "param", "said"), WRONG)
def test_a_wrong_field_is_one_sentence_that_names_it(fields: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        validated(CompletionBody, fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_null_is_the_default_of_every_field() -> None:
    asked = {"prompt": "x", "stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}}
    body = validated(CompletionBody, {**asked, "speculative": {"trace": None, "mode": None}})
    assert body.stream_options is not None
    assert not body.stream_options.include_usage
    names = CompletionBody.model_fields.keys() - {"prompt"}
    given = validated(CompletionBody, {"prompt": "x", **dict.fromkeys(names, None)})
    assert given.speculative == validated(CompletionBody, {"prompt": "x"}).speculative
    chat = ChatBody.model_fields.keys() - {"messages"}
    validated(ChatBody, {"messages": MESSAGES, **dict.fromkeys(chat, None)})


def test_a_key_is_let_in_by_its_name_and_stands_nowhere(tmp_path: Path) -> None:
    (key, line), file = new_key("alice"), tmp_path / "keys"
    file.write_text(f"# our keys\n\n{line}\n", encoding="utf-8")
    ring = KeyFile(file)
    assert ring.caller(f"Bearer {key}") == "alice"
    assert ring.caller(f"bearer {key}") == "alice"
    assert key not in line
    for other in ("", "Bearer", f"Basic {key}", f"Bearer {key}x", f"Bearer {line}", "Bearer \udcff"):
        assert ring.caller(other) is None


@pytest.mark.parametrize("text", ["alice", "alice:abc", "sk-specsplit-secret", "a b:" + "0" * 64])
def test_a_wrong_line_of_keys_is_named_by_its_number_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# one\n{text}\n", encoding="utf-8")
    with pytest.raises(InvalidSettings, match=r"^Line 2 of .*keys is not name:sha256") as caught:
        KeyFile(tmp_path / "keys")
    assert text not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a:b", "a\n"])
def test_a_key_needs_a_plain_name(name: str) -> None:
    with pytest.raises(InvalidSettings, match="A key's name"):
        new_key(name)


def _facts(drafted: int, accepted: int) -> RoundFacts:
    empty = Proposal(1, 0), Verdict((), (0,), 1)
    return RoundFacts(1, "pingpong", drafted + 1 if drafted else 0, accepted, 0.0, None, *empty, drafted)


def test_statistics_have_the_shape_of_vllm() -> None:
    record = SpeculationRecord()
    for drafted, accepted in ((3, 0), (3, 3), (0, 0), (1, 1), (3, 0)):
        record.add(_facts(drafted, accepted))
    assert record.to_dict("detailed") == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [2, 1, 0, 1],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [2, 0, 0, 1]},
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 10,
        "num_spec_tokens": 3,
        "num_tree_nodes": 14,
        "per_step_drafted": [3, 3, 1, 3],
        "per_step_accepted": [0, 3, 1, 0],
    }
    assert "per_step_drafted" not in record.to_dict("summary")
    assert SpeculationRecord().to_dict("summary")["mean_acceptance_length"] == 1.0


def _all_errors(kind: type[SpecSplitError]) -> list[type[SpecSplitError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _all_errors(child))]


async def test_a_models_counters_are_there_before_its_first_answer() -> None:
    page = samples_of(Metrics(None, ["chat"]).page().decode())
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert value(page, f"specsplit:spec_decode_{name}_total", model_name="chat") == 0
    for reason in ("stop", "length"):
        assert value(page, "specsplit:request_success_total", model_name="chat", finished_reason=reason) == 0
    assert value(page, "specsplit:num_requests_running", model_name="chat") == 0
    assert value(page, "specsplit:time_to_first_token_seconds_count", model_name="chat") == 0
    for phase in ("verify", "target_device", "draft_device"):
        assert value(page, "specsplit:round_seconds_count", model_name="chat", phase=phase) == 0
    for link in ("draft", "target"):
        for direction in ("sent", "received"):
            assert value(page, "specsplit:wire_bytes_total", model_name="chat", link=link, direction=direction) == 0


async def test_a_page_has_no_series_for_the_time_when_a_counter_was_made() -> None:
    for has_vllm_names in (False, True):
        page = Metrics(None, ["chat"], has_vllm_names=has_vllm_names).page().decode()
        assert "specsplit:generation_tokens_total" in page
        assert "_created" not in page


def test_every_error_has_an_answer() -> None:
    kinds = [kind for kind in _all_errors(SpecSplitError) if kind.__module__ == errors.__name__]
    for kind in kinds:
        error = kind.__new__(kind)
        error.__dict__.update(param=None, retry_after_s=2.5, limit="")
        answer = api_error(error)
        assert answer.status in (400, 500, 503, 504), kind
        assert json.dumps(answer.body())
    assert api_error(Overloaded("full", 2.2)).headers["retry-after"] == "3"
    assert api_error(Overloaded("yours", 2.2, "tokens")).code == "rate_limit_exceeded"
    for final in (errors.DeadlineExceeded("late"), errors.ModelDamaged("damaged")):
        assert api_error(final).headers == {"x-should-retry": "false"}, "another try would do the work once more"
    assert "secret" not in api_error(RuntimeError("secret")).message
