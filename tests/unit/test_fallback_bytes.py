"""Log-probabilities of vocabularies with byte fallback: a token that is one byte of a character keeps its byte."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specsplit.core.types import TokenLogProb
from specsplit.gateway.logprobs import TokenEntry, chat_logprobs, completion_logprobs
from specsplit.model.tokenizer import TransformersTokenizer

NAMES = ("<s>", "a", "\u2581b", *(f"<0x{byte:02X}>" for byte in range(256)))
IDS = {name: number for number, name in enumerate(NAMES)}
PARTS = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "Llama 2": decoders.Sequence([*PARTS, decoders.Strip(" ", 1, 0)]),
    "Gemma": decoders.Sequence(PARTS),
}
EURO = [IDS[f"<0x{byte:02X}>"] for byte in "\N{EURO SIGN}".encode()]


def made(decoder: decoders.Decoder) -> TransformersTokenizer:
    backend = Tokenizer(BPE(IDS, [], byte_fallback=True))
    backend.decoder = decoder
    return TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"), ())


@pytest.mark.parametrize("name", DECODERS)
def test_bytes_of_a_character_are_told_apart(name: str) -> None:
    tokenizer = made(DECODERS[name])
    tops = tuple((token_id, -1.0 - place) for place, token_id in enumerate(EURO))
    entries = [TokenEntry(token_id, TokenLogProb(log_prob, tops), 0) for token_id, log_prob in tops]
    keys = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]

    completion = completion_logprobs(tokenizer, entries)
    assert completion["tokens"] == keys
    assert [list(top) for top in completion["top_logprobs"]] == [keys] * 3

    content = chat_logprobs(tokenizer, entries)["content"]
    assert [token["bytes"] for token in content] == [[0xE2], [0x82], [0xAC]]
    assert [[top["bytes"] for top in token["top_logprobs"]] for token in content] == [[[0xE2], [0x82], [0xAC]]] * 3
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == tokenizer.decode(EURO)


@pytest.mark.parametrize("name", DECODERS)
def test_other_tokens_are_texts_as_they_were(name: str) -> None:
    tokenizer = made(DECODERS[name])
    words = ["a", "\u2581b", "<0x0A>", "<s>"]
    entries = [TokenEntry(IDS[word], TokenLogProb(0.0), 0) for word in words]
    assert completion_logprobs(tokenizer, entries)["tokens"] == ["a", " b", "\n", "<s>"]
    assert [tokenizer.fallback_byte(IDS[word]) for word in words] == [b"", b"", b"\n", b""]
    assert tokenizer.fallback_byte(len(NAMES)) == b""


def test_a_name_in_brackets_is_a_text_where_nothing_makes_a_byte_of_it() -> None:
    tokenizer = made(decoders.Metaspace())
    assert tokenizer.fallback_byte(EURO[0]) == b""
    entries = [TokenEntry(EURO[0], TokenLogProb(0.0), 0)]
    assert completion_logprobs(tokenizer, entries)["tokens"] == ["<0xE2>"]
