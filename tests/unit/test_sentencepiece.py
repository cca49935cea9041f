"""A model whose only tokenizer file is a tokenizer.model, as Llama 2 and the first Mistral were published."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from specsplit.core.errors import MissingExtra
from specsplit.core.types import TokenizerFiles
from specsplit.model.files import load_tokenizer, tokenizer_files
from specsplit.model.sent_tokenizer import tokenizer_from_files
from tests.support.model_zoo import FAMILIES

TEXTS = ["the abacus is old", "an abacus counts, slowly", "old beads count the old way"]
_SETTINGS = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def written(folder: Path, content: bytes) -> Path:
    FAMILIES["llama"]().save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(_SETTINGS))
    return folder


def test_a_tokenizer_model_is_read_and_sent_as_json(tmp_path: Path) -> None:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    made = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 300, "byte_fallback": True, "minloglevel": 2}
    trainer.train(sentence_iterator=iter(TEXTS), model_writer=made, hard_vocab_limit=False, **options)
    folder = written(tmp_path / "model", made.getvalue())
    read, _ = load_tokenizer(str(folder), "it", AutoConfig.from_pretrained(folder))
    text = "the old abacus é"
    assert read is not None
    assert read.encode(text) == AutoTokenizer.from_pretrained(folder).encode(text)
    files = tokenizer_files(folder, "it", read)
    assert isinstance(files, TokenizerFiles)
    sent = tokenizer_from_files(files, tmp_path / "sent")
    assert sent.encode(text) == read.encode(text)
    sent.close()


def test_without_sentencepiece_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "model", b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # as if it were not installed
    with pytest.raises(MissingExtra, match=r"tokenizer\.model of it needs sentencepiece: pip install sentencepiece"):
        load_tokenizer(str(folder), "it", AutoConfig.from_pretrained(folder))
