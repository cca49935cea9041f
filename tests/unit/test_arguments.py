"""The arguments of the Python API: what is taken, and one sentence for everything else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specsplit import Client, InvalidRequest, InvalidSettings, Pipeline, SpecSplitError
from specsplit.assembly.arguments import are_several, check_prompt, plain_settings
from specsplit.assembly.requests import make_request, request_settings
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import load_settings
from tests.support.fakes import FakeTokenizer

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [72, 105]),
        ([72, 105], [72, 105]),
        ((72, 105), [72, 105]),
        ([np.int64(72), torch.tensor(105)], [72, 105]),
        (range(3), [0, 1, 2]),
        (MESSAGES, list(b"user: Hi\nassistant: Hello\n")),
        (tuple(MESSAGES), list(b"user: Hi\nassistant: Hello\n")),
        ([{**MESSAGES[0], "name": "alice"}], list(b"user alice: Hi\n")),
    ],
)
def test_a_prompt_is_a_text_ids_or_messages(prompt: Any, expected: list[int]):
    assert not are_several(prompt)
    assert list(make_request(FakeTokenizer(), prompt, OrchestratorSettings()).prompt_ids) == expected


@pytest.mark.parametrize("prompts", [["a", "b"], ["a", [1, 2]], [[1], [2]], [MESSAGES, MESSAGES], (MESSAGES, "a")])
def test_a_list_of_any_of_them_is_several(prompts: Any):
    assert are_several(prompts)


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 5, 1.5, b"bytes", bytearray(b"x"), {"role": "user", "content": "Hi"}, object(), {1, 2}),
        *(np.array([1, 2]), torch.tensor([1, 2]), iter([1]), Path("x")),
        *("", [], (), "\ud800", ["a", "b"], [1, "a"], [1.0], [None], [True], [1, [2]]),
        *([{}], [{"role": "user"}], [{"role": "user", "content": None}], [*MESSAGES, "x"], [*MESSAGES, 5]),
        *([{"role": "user", "content": "Hi", "name": 5}], [{"role": "user", "content": "Hi", "name": "n" * 65}]),
        *([{"role": "user", "content": "Hi", "tools": "x"}], [{"role": "user", "name": "x"}]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_prompt_is_one_sentence(prompt: Any):
    with pytest.raises(InvalidRequest) as caught:
        check_prompt(prompt)
    _assert_sentence(caught.value)


@pytest.mark.parametrize("prompt", [[np.array([1, 2, 3]), np.array([4])], [torch.tensor([1, 2])], [5, np.array([4])]])
def test_tensors_in_a_list_are_told_of_their_lists(prompt: Any):
    with pytest.raises(InvalidRequest, match=r"whole numbers, not (ndarray|Tensor); its tolist\(\) is taken\.$"):
        check_prompt(prompt)


def test_a_tensor_is_told_of_its_list():
    with pytest.raises(InvalidRequest, match=r"not Tensor; its tolist\(\) is taken\.$"):
        check_prompt(torch.tensor([1, 2]))
    with pytest.raises(InvalidRequest, match=r"not int\.$"):
        check_prompt(5)


def _assert_sentence(error: SpecSplitError) -> None:
    assert re.fullmatch(r"[A-Za-z_'.{} ][^\n]*[^.]\.", str(error)), error
    assert "Input should" not in str(error)
    assert "validation error" not in str(error)


def test_paths_and_objects_of_torch_are_taken():
    given = {
        "target_model": Path("/models/large"),
        "draft_model": "small",
        "draft_vocab": Path("v"),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 0),
        "context": None,
    }
    assert plain_settings(given) == {
        "target_model": "/models/large",
        "draft_model": "small",
        "draft_vocab": "v",
        "dtype": "bf16",
        "device": "cuda:0",
    }
    assert plain_settings({"dtype": "fp32", "device": torch.device("cpu")}) == {"dtype": "fp32", "device": "cpu"}


@pytest.mark.parametrize("stop", ["[]", '["a"]', "a, b"])
def test_a_stop_text_in_brackets_is_no_list(stop: str):
    settings = load_settings(plain_settings({"stop": stop})).settings
    assert settings.orchestrator.stop == (stop,)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"target_model": 5}, {"target_model": b"x"}, {"target_model": ""}, {"draft_model": ["x"]}, {"target": 7001}),
        *({"target": "nowhere"}, {"config": 5}, {"config": "/nowhere.toml"}, {"dtype": torch.float64}, {"dtype": 16}),
        *({"dtype": "float"}, {"device": "tpu"}, {"device": torch.device("meta")}),
        *({"threads": "many"}, {"context": "long"}, {"context": 1}, {"sessions": 0}, {"sessions": 1.5}),
        *({"temperature": "hot"}, {"temperature": -1}, {"seed": -1}, {"stop": 5}, {"logit_bias": {"x": 1}}),
        *({"max_new_tokens": None, "nonsense": 1}, {"mode": "fast"}, {"retry": "soon"}, {"top_p": 2}),
        *({"chat_template_kwargs": "{"}, {"chat_template_kwargs": [1]}, {"chat_template_kwargs": {"a": [1]}}),
        *({"chat_template_kwargs": {5: 1}}, {"chat_template_kwargs": {"messages": "x"}}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_wrong_argument_is_one_sentence_before_anything_is_loaded(arguments: dict[str, Any]):
    with pytest.raises(SpecSplitError) as caught:
        Pipeline(**arguments)
    _assert_sentence(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [{"target": None}, {"target": 5}, {"target": ""}, {"target": "x:1", "draft": 5}, {"target": "x:1", "context": 64}],
    ids=lambda value: type(value).__name__,
)
def test_a_wrong_argument_of_a_client_is_one_sentence(arguments: dict[str, Any]):
    with pytest.raises(SpecSplitError) as caught:
        Client(**arguments)
    _assert_sentence(caught.value)


def test_variables_reach_the_chat_template_and_nothing_else():
    settings = OrchestratorSettings(chat=True, chat_template_kwargs={"enable_thinking": False, "none": None})
    for prompt in ("Hi", MESSAGES[:1]):
        ids = make_request(FakeTokenizer(), prompt, settings).prompt_ids
        assert bytes(ids) == b"user: Hi\nenable_thinking=False\n"
    assert bytes(make_request(FakeTokenizer(), [72], settings).prompt_ids) == b"H"


def test_variables_of_a_request_stand_for_those_of_the_settings():
    settings = OrchestratorSettings(chat_template_kwargs={"a": 1, "b": 2})
    assert request_settings(settings, {"chat_template_kwargs": {"b": 3}}).chat_template_kwargs == {"b": 3}
    assert request_settings(settings, {"chat_template_kwargs": {}}).chat_template_kwargs == {}
    assert request_settings(settings, {}).chat_template_kwargs == {"a": 1, "b": 2}
    with pytest.raises(InvalidRequest, match=r"^chat_template_kwargs must not have tools, which only"):
        request_settings(settings, {"chat_template_kwargs": {"tools": "x"}})


def test_variables_of_a_request_without_a_template_are_refused():
    settings, given = OrchestratorSettings(), {"chat_template_kwargs": {"a": 1}}
    for prompt, options in (("Hi", given), ([72], given), ([72], {**given, "chat": True})):
        with pytest.raises(InvalidRequest, match="needs messages, or a text with chat") as caught:
            request_settings(settings, options, prompt)
        _assert_sentence(caught.value)
    for prompt, options in ((MESSAGES, given), ("Hi", {**given, "chat": True}), ("Hi", {"chat_template_kwargs": {}})):
        assert request_settings(settings, options, prompt).chat_template_kwargs == options["chat_template_kwargs"]


def test_a_client_that_is_not_connected_says_so():
    client = Client("127.0.0.1:1")
    with pytest.raises(InvalidRequest, match="not connected"):
        client.stream("Hi")


def test_a_client_takes_no_model_of_its_own():
    with pytest.raises(InvalidSettings, match="is for a model loaded here"):
        Client("x:1", dtype="fp32")  # pyright: ignore[reportCallIssue]
