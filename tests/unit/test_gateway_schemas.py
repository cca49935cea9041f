"""Bodies as the clients of others send them: what is taken, what is refused, and that /openapi.json says so."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import jsonschema
import pytest

from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.body import validated
from specsplit.gateway.completions import make_requests
from specsplit.gateway.deadline import Deadline
from specsplit.gateway.errors import ApiError
from specsplit.gateway.models import ModelTable
from specsplit.gateway.schemas import Body, ChatBody, CompletionBody, StreamOptions
from specsplit.gateway.tokenization_bodies import TokenizeBody

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "extra",
    [
        {"type": "text"},  # lm-eval
        {"provider_specific_fields": {"a": 1}, "reasoning_content": "so", "thinking_blocks": None},  # LiteLLM
        {"id": 5, "opts": {"visible": True}},  # CodeCompanion
        {"tool_calls": [], "refusal": None, "annotations": [], "prefix": False},
    ],
)
def test_what_clients_add_to_a_message_is_ignored(extra: dict[str, Any]) -> None:
    for schema in (ChatBody, TokenizeBody):
        assert validated(schema, {"messages": [{**MESSAGES[0], **extra}]}) == validated(schema, {"messages": MESSAGES})


@pytest.mark.parametrize(
    "extra",
    [
        {"tool_calls": [{"id": "a"}]},
        {"function_call": {"name": "f"}},
        {"audio": {"id": "a"}},
        {"prefix": True},
        {"partial": True},
    ],
)
def test_what_changes_the_text_of_a_message_is_refused(extra: dict[str, Any]) -> None:
    (name,) = extra
    with pytest.raises(ApiError, match=f"^{name} is not supported"):
        validated(ChatBody, {"messages": [{"role": "assistant", "content": "x", **extra}]})


def test_a_text_part_may_have_more_than_its_text() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    (message,) = validated(ChatBody, {"messages": [{"role": "user", "content": parts}]}).messages
    assert message.content == "a\nb"
    for part in ({"type": "image_url", "image_url": {"url": "x"}, "text": "a"}, {"type": "text"}, {"text": "a"}):
        with pytest.raises(ApiError, match="this server takes text alone"):
            validated(ChatBody, {"messages": [{"role": "user", "content": [part]}]})


@pytest.mark.parametrize("name", ["cache_salt", "vllm_xargs", "guided_decoding_backend", "samplers", "other"])
def test_a_null_of_any_name_asks_for_nothing(name: str) -> None:
    asked: list[tuple[type[Body], dict[str, Any]]] = [
        (ChatBody, {"messages": MESSAGES}),
        (CompletionBody, {"prompt": "x"}),
        (TokenizeBody, {"prompt": "x"}),
        (StreamOptions, {"include_usage": True}),
    ]
    for schema, fields in asked:
        assert validated(schema, {**fields, name: None}) == validated(schema, fields)
        with pytest.raises(ApiError, match=f"^{name} is not a field"):
            validated(schema, {**fields, name: 1})


def test_as_many_candidates_as_answers_ask_for_nothing() -> None:
    assert validated(CompletionBody, {"prompt": "x", "n": 3, "best_of": 3}).n == 3
    for n, best_of in ((3, 4), (None, 2)):
        with pytest.raises(ApiError, match=r"^best_of is not supported"):
            validated(CompletionBody, {"prompt": "x", "n": n, "best_of": best_of})


def test_a_penalty_in_the_words_of_llama_cpp_is_refused_with_ours() -> None:
    with pytest.raises(ApiError, match=r"^repeat_penalty is not supported .* repetition_penalty"):
        validated(ChatBody, chat(repeat_penalty=1.1))


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


BODIES: list[tuple[type[Body], dict[str, Any], bool]] = [
    (CompletionBody, {"prompt": "x", "logit_bias": {"5": 1}, "stop": "a"}, True),
    (CompletionBody, {"prompt": [1, 2], "logit_bias": None, "stop": None, "speculative": None}, True),
    (CompletionBody, {"prompt": ["x", [1, 2]], "stop": ["a", "b"], "best_of": 1, "suffix": ""}, True),
    (CompletionBody, {"prompt": "x", "detokenize": True, "add_generation_prompt": True, "id_slot": -1}, True),
    (CompletionBody, {"prompt": "x", "repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "cache_prompt": True}, True),
    (ChatBody, chat(echo=False, return_token_ids=False, include_reasoning=True, repeat_penalty=1.0), True),
    (ChatBody, chat(tools=[], store=False, response_format={"type": "text"}, chat_template_kwargs=None), True),
    (ChatBody, chat([{"type": "text", "text": "a", "cache_control": {}}], cache_salt=None), True),
    (ChatBody, chat(chat_template_kwargs={"a": 1, "b": None}, stream=True, stream_options={}), True),
    (ChatBody, {"messages": [{"role": "user", "content": "hi", "type": "text", "tool_calls": []}]}, True),
    (TokenizeBody, {"prompt": "x", "add_special_tokens": True}, True),
    (TokenizeBody, chat(add_special_tokens=False), True),
    (CompletionBody, {"prompt": "x", "typ_p": 1, "n_probs": 0, "xtc_probability": 0, "dry_multiplier": 0.0}, True),
    (ChatBody, chat(timings_per_token=False, reasoning_format="none", top_n_sigma=-1), True),
    (ChatBody, chat(continue_final_message=True, add_generation_prompt=False, stop_token_ids=[5]), True),
    (CompletionBody, {"prompt": "x", "stop_token_ids": [-1]}, False),
    (CompletionBody, {"prompt": "x", "xtc_probability": 0.5}, False),
    (CompletionBody, {"prompt": "x", "logit_bias": [[5, 1]]}, False),
    (CompletionBody, {"prompt": []}, False),
    (CompletionBody, {"prompt": "x", "stop": ["a"] * 99}, False),
    (CompletionBody, {"prompt": "x", "stop": ""}, False),
    (CompletionBody, {"prompt": "x", "best_of": 2}, False),
    (CompletionBody, {"prompt": "x", "samplers": []}, False),
    (CompletionBody, {"prompt": "x", "cache_prompt": False}, False),
    (ChatBody, chat(echo=True), False),
    (ChatBody, chat(include_reasoning=False), False),
    (ChatBody, chat(tools=[{"type": "function"}]), False),
    (ChatBody, chat(tempreature=1), False),
    (ChatBody, chat([{"type": "image_url"}]), False),
    (ChatBody, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, False),
]


async def test_the_description_takes_what_the_server_takes() -> None:
    transport = httpx.ASGITransport(app=create_app(Gateway(models=ModelTable([]), version="1")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        document = (await client.get("/openapi.json")).json()
    for schema, fields, is_taken in BODIES:
        described = {**document, "$ref": f"#/components/schemas/{schema.__name__}"}
        assert jsonschema.Draft202012Validator(described).is_valid(fields) == is_taken, fields
        if is_taken:
            validated(schema, fields)
        else:
            with pytest.raises(ApiError):
                validated(schema, fields)


@pytest.mark.parametrize("schema", [ChatBody, TokenizeBody])
def test_an_answer_begins_a_message_or_goes_on_with_the_last(schema: type[Body]) -> None:
    fields = {"messages": [*MESSAGES, {"role": "assistant", "content": "{"}]}
    for begins, continues in ((None, True), (False, True), (True, None), (True, False), (None, False)):
        ending = {"add_generation_prompt": begins, "continue_final_message": continues}
        validated(schema, {**fields, **ending})
    for begins in (0, 1, "yes"):
        with pytest.raises(ApiError, match="must be true or false"):
            validated(schema, {**fields, "add_generation_prompt": begins})
    for begins, continues in ((True, True), (False, False), (False, None)):
        ending = {"add_generation_prompt": begins, "continue_final_message": continues}
        with pytest.raises(ApiError, match=r"^Either add_generation_prompt or continue_final_message must be true"):
            validated(schema, {**fields, **ending})


def test_a_least_length_asks_for_nothing_where_nothing_ends_sooner() -> None:
    fields = {"prompt": "x", "max_tokens": 9, "min_tokens": 9, "ignore_eos": True}
    validated(CompletionBody, fields)
    for more in ({"stop": "a"}, {"stop_token_ids": [5]}, {"ignore_eos": False}):
        with pytest.raises(ApiError, match="min_tokens is not supported"):
            validated(CompletionBody, {**fields, **more})


def test_a_seed_of_minus_one_is_a_random_one() -> None:
    def seeds(seed: int) -> set[int | None]:
        body = validated(CompletionBody, {"prompt": "x", "seed": seed})
        made = [make_requests(body, [(1,)], 5, None, "", Deadline(None, 0.0)) for _ in range(4)]
        return {request.seed for (request,) in made}

    assert len(seeds(-1)) == 4
    assert seeds(-2) == {2**64 - 2}
