"""Token by token, the bytes of a byte-level vocabulary join to the decoded text; other tokenizers have none."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specsplit.core.defaults import EMBEDDED
from specsplit.model.source import resolve
from specsplit.model.tokenizer import TransformersTokenizer
from specsplit.orchestrator.text import ByteDetokenizer, Detokenizer, detokenizer_of
from tests.support.model_zoo import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> TransformersTokenizer:
    """The embedded one, with tokens added: letters that stand for bytes, others, and one that is left out."""
    made = AutoTokenizer.from_pretrained(resolve(EMBEDDED, "target")[0])
    made.add_tokens(["<plain>", "ĠĠ", "<€ 😀>", AddedToken("<left out>", special=True)])
    return TransformersTokenizer(made, ())


def text_of(tokenizer: TransformersTokenizer, token_ids: list[int]) -> str:
    detokenizer = detokenizer_of(tokenizer)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


@pytest.mark.parametrize("seed", range(20))
def test_the_deltas_join_to_the_decoded_text(tokenizer: TransformersTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    num_ids = tokenizer.num_tokens
    assert isinstance(detokenizer_of(tokenizer), ByteDetokenizer)
    for _ in range(50):
        near = rng.choice([260, num_ids])  # single bytes, most of which begin no character; or any token
        token_ids = [rng.randrange(near) for _ in range(rng.randrange(40))]
        token_ids += rng.sample(range(num_ids - 5, num_ids + 1), 2)  # what was added, and an id of no token
        assert text_of(tokenizer, token_ids) == tokenizer.decode(token_ids)


def test_a_text_comes_back_as_it_was(tokenizer: TransformersTokenizer) -> None:
    text = "naïve  tabs\t\tand\r\nlines, 漢字 and 😀\N{ZERO WIDTH JOINER}😀"
    assert text_of(tokenizer, tokenizer.encode(text)) == text


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.ByteFallback(), None], ids=str)
def test_where_a_token_says_nothing_by_itself_a_window_is_decoded(decoder: decoders.Decoder | None) -> None:
    backend = Tokenizer(BPE({"▁a": 0, "b": 1}, []))
    if decoder is not None:
        backend.decoder = decoder
    made = TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), ())
    assert made.token_bytes is None
    assert isinstance(detokenizer_of(made), Detokenizer)


class _Watched(PreTrainedTokenizerFast):
    """Notes how many threads encode at a time."""

    num_inside = most_inside = 0

    def encode(self, *given: Any, **switches: Any) -> list[int]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        time.sleep(0.05)
        self.num_inside -= 1
        return super().encode(*given, **switches)


def test_no_thread_switches_control_tokens_within_the_encode_of_another() -> None:
    made = _Watched(tokenizer_object=byte_tokenizer().backend_tokenizer)
    made.chat_template = "{{ messages[0].content }}"
    tokenizer = TransformersTokenizer(made, ())
    with ThreadPoolExecutor() as pool:
        plain = [pool.submit(tokenizer.encode, "hi") for _ in range(4)]
        chat = pool.submit(tokenizer.encode_messages, [{"role": "user", "content": "hi"}])
    assert [each.result() for each in plain] == [chat.result()] * 4
    assert made.most_inside == 1
