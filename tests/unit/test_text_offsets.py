"""`text_offset` of completions: the place of each token in the text, streamed or whole, whatever text is held back."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specsplit.core.types import Scores, TokenLogProb
from specsplit.gateway.answers import Answers
from specsplit.gateway.completions import CompletionFormat, make_requests, prompt_ids
from specsplit.gateway.deadline import Deadline
from specsplit.gateway.logprobs import TextOffsets
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ServedModel
from specsplit.gateway.schemas import CompletionBody
from specsplit.model.tokenizer import TransformersTokenizer
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.language import TOKENS, BlankDroppingTokenizer, WindowedTokenizer

PROMPT = "a €:"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def answers(tokenizer: FakeTokenizer, target: FakeTarget | None = None, **fields: Any) -> Answers:
    target = target or FakeTarget()
    orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"))
    model = ServedModel("small", await target.ping(), tokenizer, target, lambda _: orchestrator)
    body = CompletionBody(**{"prompt": PROMPT, "max_tokens": 24, "logprobs": 1, "ignore_eos": True, **fields})
    deadline = Deadline.from_now(None)
    prompts = await prompt_ids(model, body, deadline)
    return Answers(
        id="cmpl-1",
        model=model,
        body=body,
        requests=make_requests(body, prompts, body.token_limit, body.logprobs, "", deadline),
        num_prompt_tokens=len(prompts[0]),
        format=CompletionFormat(model, body),
        metrics=Metrics(),
        detail="none",
        answering=lambda num_tokens: nullcontext(lambda count: None),
    )


async def whole(tokenizer: FakeTokenizer, target: FakeTarget | None = None, **fields: Any) -> list[dict[str, Any]]:
    return (await (await answers(tokenizer, target, **fields)).whole())["choices"]


async def joined(tokenizer: FakeTokenizer, target: FakeTarget | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices that the events of a stream join to."""
    made = await answers(tokenizer, target, **fields)
    choices: list[dict[str, Any]] = [
        {"index": index, "text": "", "logprobs": {name: [] for name in LISTS}, "finish_reason": None}
        for index in range(len(made.requests))
    ]
    events: AsyncGenerator[dict[str, Any]] = made.events()
    async with aclosing(events):
        async for event in events:
            for part in event["choices"]:
                choice = choices[part["index"]]
                choice["text"] += part["text"]
                choice["finish_reason"] = part["finish_reason"]
                for name in LISTS:
                    choice["logprobs"][name] += part["logprobs"][name]
    return choices


@pytest.mark.parametrize(
    "tokenizer", [FakeTokenizer(), WindowedTokenizer(), BlankDroppingTokenizer()], ids=["bytes", "windows", "blanks"]
)
@pytest.mark.parametrize("fields", [{}, {"stop": ["b E", "END", "€"]}, {"echo": True}], ids=str)
async def test_a_stream_joins_to_the_arrays_of_the_whole_answer(
    tokenizer: FakeTokenizer, fields: dict[str, Any]
) -> None:
    for seed in range(12):
        asked = {"seed": seed, "n": 2, **fields}
        assert await joined(tokenizer, **asked) == await whole(tokenizer, **asked)


@pytest.mark.parametrize("fields", [{}, {"stop": [" E", "END"]}, {"echo": True}, {"prompt": [*b"ab"]}], ids=str)
async def test_the_first_blank_of_an_answer_has_its_place(fields: dict[str, Any]) -> None:
    firsts: set[str] = set()
    for seed in range(40):
        (choice,) = await whole(BlankDroppingTokenizer(), seed=seed, **fields)
        assert [choice] == await whole(WindowedTokenizer(), seed=seed, **fields)
        firsts.add(choice["text"].removeprefix(PROMPT if "echo" in fields else "")[:1])
    assert " " in firsts


@pytest.mark.parametrize("echo", [False, True])
async def test_an_offset_is_the_character_with_which_the_token_begins(echo: bool) -> None:
    num_inside = 0
    for seed in range(12):
        made = await answers(FakeTokenizer(), seed=seed, echo=echo)
        (choice,) = (await made.whole())["choices"]
        request, start = made.requests[0], len(PROMPT) if echo else 0
        ids = (await made.model.orchestrator(None).generate(request)).token_ids
        # [characters before the token | the token, whose first bytes may be within a character]
        before = [b"".join(TOKENS[each] for each in ids[:place]) for place in range(len(ids))]
        whole_characters = [codecs.utf_8_decode(data, "replace", False) for data in before]
        num_inside += sum(count < len(data) for data, (_, count) in zip(before, whole_characters, strict=True))
        offsets: list[int] = choice["logprobs"]["text_offset"]
        assert offsets[-len(ids) :] == [start + len(text) for text, _ in whole_characters]
        assert offsets[: -len(ids)] == ([0, 1, 2, 2, 2, 3] if echo else [])
    assert num_inside > 12, "some tokens begin within a character"


class WatchingTarget(FakeTarget):
    """A target with room for scores while nobody has a slot."""

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        assert not self.slots, "an answer that waits for the scores keeps them from their slot"
        return await super().score(prompt, scored, logit_bias, top_logprobs, keep_for)


async def test_an_echo_of_ids_is_decoded_once_for_all_choices() -> None:
    class CountingTokenizer(FakeTokenizer):
        num_whole = 0

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            self.num_whole += list(token_ids) == [*b"abcd"]
            return super().decode(token_ids)

    tokenizer = CountingTokenizer()
    made = await whole(tokenizer, prompt=[*b"abcd"], echo=True, n=5, seed=1)
    assert all(choice["text"].startswith(super(CountingTokenizer, tokenizer).decode([*b"abcd"])) for choice in made)
    assert tokenizer.num_whole == 1


async def test_an_echo_is_scored_before_its_answers_have_slots() -> None:
    asked = {"prompt": ["ab", "cd"], "echo": True, "n": 2, "seed": 3}
    streamed = await joined(FakeTokenizer(), WatchingTarget(), **asked)
    assert streamed == await whole(FakeTokenizer(), WatchingTarget(), **asked)
    assert [choice["text"][:2] for choice in streamed] == ["ab", "ab", "cd", "cd"]


class Controls(FakeTokenizer):
    """Its last token is a control token."""

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == 256 else super().token_text(token_id)


def test_a_control_token_has_the_length_that_it_has_in_the_text() -> None:
    nothing: list[TokenLogProb | None] = [None] * 4
    for text, expected in (("ab", [0, 0, 1, 2]), ("<s>ab", [0, 3, 4, 5]), ("ab<s>", [0, 0, 1, 2])):
        entries = TextOffsets(Controls(), text=text).entries([256, *b"ab", 256], nothing)
        assert [entry.offset for entry in entries] == expected


def test_the_blank_that_decoders_drop_has_no_length() -> None:
    vocabulary = {"<s>": 0, "\u2581": 1, "a": 2, "\u2581a": 3, "b": 4}
    backend = Tokenizer(BPE(vocabulary, [("\u2581", "a")]))
    backend.decoder = decoders.Metaspace()
    tokenizer = TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"), ())
    nothing: list[TokenLogProb | None] = [None] * 4
    for text, expected in ((" ab", [0, 0, 0, 2]), ("<s> ab", [0, 3, 3, 5])):
        assert [entry.offset for entry in TextOffsets(tokenizer, text=text).entries([0, 1, 3, 4], nothing)] == expected


async def test_prompts_with_the_same_ids_have_offsets_in_texts_of_their_own() -> None:
    class Named(Controls):
        def encode(self, text: str) -> list[int]:
            return [256, *super().encode(text.removeprefix("<s>"))]

    asked = {"prompt": ["ab", "<s>ab"], "echo": True, "max_tokens": 1, "seed": 3}
    choices = await whole(Named(), **asked)
    assert [choice["logprobs"]["text_offset"][:3] for choice in choices] == [[0, 0, 1], [0, 3, 4]]
