"""Heads that follow the texts, of models of other widths, with heads of their own and with rounded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.draft_vocab import frequent_ids
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.vocab_file import DEFAULT_DRAFT_VOCAB
from tests.support.fakes import FakeTokenizer
from tests.support.model_zoo import small
from tests.support.packs import require_packs

NUM_TOKENS, NUM_KEPT = 2048, 512
RARE = [1900, 2000, 1999]


def made(folder: Path, width: int, *, is_tied: bool, num_tokens: int = NUM_TOKENS) -> str:
    """Save a model of one layer with random weights, without a tokenizer."""
    sizes = {"vocab_size": num_tokens, "hidden_size": width, "num_hidden_layers": 1, "tie_word_embeddings": is_tied}
    torch.manual_seed(width)
    LlamaForCausalLM(small(LlamaConfig, **sizes)()).save_pretrained(folder)
    return str(folder)


def logits_of(model: LoadedModel) -> torch.Tensor:
    """Return the logits [2, V] of a short text."""
    rows = model.runner.forward([SequenceInput(0, 0, [5, 3, *RARE, 7], num_logits=2)])[0]
    return rows if model.runner.columns is None else model.runner.columns.over_vocabulary(rows)


def loaded(path: str, vocab: str | None, dtype: str | None = None) -> LoadedModel:
    return load_model(path, role="draft", threads=1, context=64, vocab=vocab, dtype=dtype)


@pytest.mark.parametrize("width", [896, 1536, 2304])
@pytest.mark.parametrize(
    ("is_tied", "dtype"), [(True, "fp32"), (False, "fp32"), (True, "int8")], ids=["tied", "head of its own", "int8"]
)
def test_a_head_of_any_width_follows_its_texts(width: int, dtype: str, tmp_path: Path, *, is_tied: bool) -> None:
    require_packs(dtype)
    path = made(tmp_path, width, is_tied=is_tied)
    whole, trimmed = loaded(path, "all", dtype), loaded(path, str(NUM_KEPT), dtype)
    assert trimmed.runner.is_recorded
    trimmed.runner.see_text(RARE)
    ours, theirs = logits_of(trimmed), logits_of(whole)
    kept = ours.isfinite()
    assert kept[0].nonzero().flatten().tolist()[-3:] == sorted(RARE)
    assert int(kept[0].sum()) == NUM_KEPT + NUM_KEPT // 16
    tolerance = 1e-4 if dtype == "fp32" else 0.02  # rows of texts are not rounded
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=tolerance, atol=tolerance)


def test_rows_of_all_tokens_are_counted_and_go_where_weights_are_rounded(tmp_path: Path) -> None:
    require_packs("int8")
    path, matrix_bytes = made(tmp_path, 512, is_tied=False), 4 * NUM_TOKENS * 512
    exact, rounded = loaded(path, str(NUM_KEPT), "fp32"), loaded(path, str(NUM_KEPT), "int8")
    head_bytes = matrix_bytes * NUM_KEPT // NUM_TOKENS
    assert exact.weight_bytes >= 2 * matrix_bytes + head_bytes, "embedding, all rows and those of the head"
    assert rounded.weight_bytes < matrix_bytes + head_bytes
    rounded.runner.see_text(RARE)
    assert int(logits_of(rounded)[0].isfinite().sum()) == NUM_KEPT


def test_a_large_vocabulary_is_trimmed_by_default_for_a_draft_alone(tmp_path: Path) -> None:
    size = 2 * DEFAULT_DRAFT_VOCAB
    path = made(tmp_path, 32, is_tied=True, num_tokens=size)
    draft = loaded(path, None)
    assert draft.runner.columns is not None
    assert len(draft.runner.columns.token_ids) == DEFAULT_DRAFT_VOCAB * 17 // 16
    assert loaded(path, "all").runner.columns is None
    assert load_model(path, role="target", threads=1, context=64).runner.columns is None
    assert loaded(made(tmp_path, 32, is_tied=True, num_tokens=size - 1), None).runner.columns is None


class _SentencePieces(FakeTokenizer):
    """Characters stand behind all merges, and a text begins with a blank, which is one token with what follows."""

    eos_ids = (1,)

    def encode(self, text: str) -> list[int]:
        if "\x0b" in text:
            raise ValueError("no token has this character")
        return [400 + ord(text[0]), *(200_000 + ord(character) for character in text[1:])]


def test_characters_of_ascii_are_frequent_tokens_wherever_they_stand() -> None:
    kept = frequent_ids(_SentencePieces(), 256_000)
    assert kept is not None
    assert set(range(DEFAULT_DRAFT_VOCAB)) < set(kept)
    assert {200_000 + ord(character) for character in "aZ7.,(){}\n "} < set(kept)
    assert len(kept) == DEFAULT_DRAFT_VOCAB + 99
    assert kept == sorted(kept)
