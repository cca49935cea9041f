"""The first blank of an answer, which decoders of Llama 2's kind drop at the beginning of a text, but not within it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specsplit.model.tokenizer import TransformersTokenizer
from specsplit.orchestrator.text import Answer, Detokenizer
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.language import BlankDroppingTokenizer, WindowedTokenizer
from tests.support.lmtp_channels import MemoryClient, served

WORDS = ("<s>", "\u2581", "a", "\u2581a", "\u2581\u2581", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "<0x80>", "\u2581b")
IDS = {word: token_id for token_id, word in enumerate(WORDS)}
PARTS = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
DROPPING = {
    "Llama 2": decoders.Sequence([*PARTS, decoders.Strip(" ", 1, 0)]),
    "Metaspace": decoders.Metaspace(),
}
WHOLE = [["<s>"], ["\u2581"], ["a"], ["\u2581a"], ["\u2581\u2581"], ["<0x0A>"], ["<0xE2>", "<0x82>", "<0xAC>"]]


def made(decoder: decoders.Decoder) -> TransformersTokenizer:
    backend = Tokenizer(BPE(IDS, [], byte_fallback=True))
    backend.decoder = decoder
    return TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"), ())


TOKENIZERS = {name: made(decoder) for name, decoder in DROPPING.items()}
GEMMA = made(decoders.Sequence(PARTS))
"""It drops nothing."""


def ids_of(*words: str) -> tuple[int, ...]:
    return tuple(IDS[word] for word in words)


def whole_ids(units: Sequence[Sequence[str]]) -> tuple[int, ...]:
    return ids_of(*(word for unit in units for word in unit))


texts = st.lists(st.sampled_from(WHOLE), min_size=1, max_size=40).map(whole_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        (["<s>", "\u2581a"], ["\u2581b", "a"], " ba"),
        (["<s>", "\u2581a", "<0x0A>"], ["\u2581\u2581", "\u2581a"], "   a"),
        (["<s>", "\u2581a", "<s>"], ["\u2581", "\u2581a"], "  a"),
        (["<s>", "\u2581a", "<0xE2>", "<0x82>", "<0xAC>"], ["\u2581a"], " a"),
        (["<s>", "\u2581a"], ["a"], "a"),
        (["<s>"], ["\u2581a", "\u2581a"], "a a"),
    ],
)
def test_an_answer_begins_as_its_prompt_goes_on(name: str, prompt: list[str], answer: list[str], expected: str) -> None:
    for stop in ((), ("END",)):
        found = Answer(TOKENIZERS[name], ids_of(*prompt), eos_ids=(), stop=stop, max_tokens=len(answer))
        cut = found.take(ids_of(*answer), 1)
        assert (found.text, cut.finish_reason) == (expected, "length")


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=texts, answer=texts)
def test_an_answer_is_what_it_adds_to_the_prompt(name: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    decode, prompt = TOKENIZERS[name].decode, ids_of("<s>", "\u2581") + prompt
    detokenizer = Detokenizer(decode, prompt)
    shown = detokenizer.push_all(answer) + detokenizer.flush()
    assert decode(prompt) + shown == decode(prompt + answer)


def test_the_blank_may_be_a_stop_string_of_its_own() -> None:
    answer = Answer(TOKENIZERS["Llama 2"], ids_of("<s>", "\u2581a"), eos_ids=(), stop=(" ",), max_tokens=9)
    assert answer.take(ids_of("\u2581a", "a"), 0).finish_reason == "stop"
    assert answer.text == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("num_words", range(12))
@pytest.mark.parametrize("num_controls", [1, 3, 60])
def test_a_word_behind_control_tokens_keeps_its_blank(name: str, num_words: int, num_controls: int) -> None:
    words, decode = ids_of("\u2581a") * num_words, TOKENIZERS[name].decode
    token_ids = words + ids_of("<s>") * num_controls + ids_of("\u2581b", "a") + words
    detokenizer = Detokenizer(decode)
    assert detokenizer.push_all(token_ids) + detokenizer.flush() == decode(token_ids)


any_ids = st.lists(st.integers(0, len(WORDS) - 1), max_size=150)


@given(prompt=any_ids, answer=any_ids)
def test_where_no_blank_is_dropped_every_piece_is_as_it_was(prompt: list[int], answer: list[int]) -> None:
    alone, behind = Detokenizer(GEMMA.decode), Detokenizer(GEMMA.decode, prompt)
    assert [behind.push(each) for each in answer] == [alone.push(each) for each in answer]
    assert behind.flush() == alone.flush()


@pytest.mark.parametrize("asked", [{}, {"x_resume_from": 3}], ids=["whole", "resumed"])
async def test_a_stream_of_lmtp_begins_as_its_prompt_goes_on(asked: dict[str, int]) -> None:
    async def items(tokenizer: FakeTokenizer, seed: int) -> list[dict[str, object]]:
        target = FakeTarget()
        client = MemoryClient(target, await served(target, tokenizer), None)
        return await client.answer(
            "GENERATE", prompt="ab", seed=seed, temperature=1, max_tokens=12, ignore_eos=True, **asked
        )

    firsts: set[object] = set()
    for seed in range(24):
        found = await items(BlankDroppingTokenizer(), seed)
        assert found == await items(WindowedTokenizer(), seed)
        firsts.add(found[0]["text"])
    assert " " in firsts
