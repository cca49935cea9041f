"""Wrong input to the Python API: one sentence that names it, nothing is loaded, and the next request has its text."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specsplit import Client, InvalidRequest, ModelError, Pipeline, SpecSplitError, UsageError
from tests.support.wrong_inputs import MODELS, OPTIONS, PROMPTS, REQUEST_OPTIONS, SETTINGS, SEVERAL, spread

PROMPT = "def add(a, b):"
CLIENT = (
    *OPTIONS,
    *({"target": value} for value in (None, 5, b"x:1", "", "x", "x:0", "Qwen/Qwen3-8B")),
    *({"draft": 5}, {"draft": "y"}, {"config": 5}, {"target_model": "x"}, {"context": 64}, {"device": "cpu"}),
)


@pytest.fixture
def no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which any attempt to load a model is an error of Python's."""
    monkeypatch.setitem(sys.modules, "specsplit.model.loader", None)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with Pipeline(max_new_tokens=4, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(pipeline: Pipeline) -> str:
    return pipeline.generate(PROMPT).text


def refusal(call: Callable[[], object], kind: type[SpecSplitError]) -> str:
    """Return the one sentence with which a call is refused, of an error of that kind."""
    with pytest.raises(SpecSplitError) as caught:
        call()
    said = str(caught.value)
    assert isinstance(caught.value, kind), said
    assert caught.value.exit_code == (2 if kind is UsageError else 1)
    assert re.fullmatch(r"\S[^\n]*[^.\s]\.", said), said
    for inside in ("Traceback", "Error", "Input should", "validation", "pydantic", "Unexpected"):
        assert inside not in said
    assert len(said) < 400
    return said


def names(said: str, given: dict[str, Any]) -> bool:
    """Return whether a sentence names the option that is wrong, as Python or the command line does, or its value."""
    spelt = said.replace("-", "_")
    return any(
        re.search(rf"(?<![a-z]){name}(?![a-z])", spelt) or (isinstance(value, str) and len(value) > 2 and value in said)
        for name, value in given.items()
    )


def calls(pipeline: Pipeline, prompt: Any, **options: Any) -> list[Callable[[], object]]:
    """Return every way to ask for the answer to one prompt."""

    async def whole() -> object:
        return await pipeline.agenerate(prompt, **options)

    async def streamed() -> object:
        return [chunk async for chunk in pipeline.astream(prompt, **options)]

    return [
        lambda: pipeline.generate(prompt, **options),
        lambda: list(pipeline.stream(prompt, **options)),
        lambda: asyncio.run(whole()),
        lambda: asyncio.run(streamed()),
    ]


def test_there_are_enough_wrong_inputs():
    assert min(map(len, (OPTIONS, REQUEST_OPTIONS, SETTINGS, CLIENT))) >= 60
    assert len(PROMPTS) + len(SEVERAL) >= 60


@pytest.mark.usefixtures("no_loader")
@pytest.mark.parametrize("given", spread(SETTINGS, 12))
def test_wrong_settings_of_a_pipeline_load_nothing(given: dict[str, Any]):
    assert names(refusal(lambda: Pipeline(**given), UsageError), given)


@pytest.mark.usefixtures("no_loader")
@pytest.mark.parametrize("place", ["target_model", "draft_model"])
@pytest.mark.parametrize("model", spread(MODELS, 4))
def test_a_model_that_is_not_to_be_had_is_named(place: str, model: str):
    said = refusal(lambda: Pipeline(**{place: model}), ModelError)  # type: ignore[arg-type]
    assert (model if model.isprintable() and model.strip() else repr(model))[:50] in said


@pytest.mark.parametrize("given", spread(CLIENT, 4))
def test_wrong_settings_of_a_client_are_named(given: dict[str, Any]):
    said = refusal(lambda: Client(**{"target": "x:1", **given}), UsageError)
    assert names(said, given) or said.startswith("A Client has workers elsewhere")


@pytest.mark.parametrize("options", spread(REQUEST_OPTIONS, 12))
def test_a_wrong_option_is_named_and_the_next_text_is_right(options: dict[str, Any], pipeline: Pipeline, text: str):
    for call in calls(pipeline, "a", **options):
        assert names(refusal(call, UsageError), options)
    assert pipeline.generate(PROMPT).text == text


@pytest.mark.parametrize("prompt", spread(PROMPTS, 12))
def test_a_wrong_prompt_is_refused_and_the_next_text_is_right(prompt: Any, pipeline: Pipeline, text: str):
    for call in calls(pipeline, prompt):
        assert re.search("prompt", refusal(call, UsageError), re.IGNORECASE)
    assert pipeline.generate(PROMPT).text == text


@pytest.mark.parametrize("prompts", spread(SEVERAL, 4))
def test_one_wrong_prompt_of_several_refuses_the_list(prompts: Any, pipeline: Pipeline, text: str):
    for call in calls(pipeline, prompts):
        assert re.search("prompt", refusal(call, UsageError), re.IGNORECASE)
    assert pipeline.generate([PROMPT, PROMPT])[1].text == text


def test_a_pipeline_that_is_closed_says_so_however_it_is_asked():
    pipeline = Pipeline(mode="plain", threads=1)
    pipeline.close()
    for call in (*calls(pipeline, PROMPT), *calls(pipeline, [PROMPT, PROMPT])):
        assert "closed" in refusal(call, UsageError)


async def test_a_client_that_is_not_connected_says_so_however_it_is_asked():
    client = Client("127.0.0.1:1")
    await client.aclose()
    for asked in (client.generate("a"), client.generate(["a", "b"]), client.score([1], [2])):
        with pytest.raises(InvalidRequest, match="not connected"):
            await asked
    with pytest.raises(InvalidRequest, match="not connected"):
        client.stream("a")
