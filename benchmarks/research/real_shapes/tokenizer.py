"""A byte-level BPE tokenizer of any vocabulary size, as large in memory and on disk as a published one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from string import ascii_letters

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_SPACE = "Ġ"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose tokens are the 256 bytes, then pairs and triples of letters, then an end of text."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = _SPACE + ascii_letters
    pairs = list(product(letters, letters))
    triples = ((first + second, third) for first, second, third in product(letters, repeat=3))
    merges = pairs[: vocab_size - 1 - len(tokens)]
    room = vocab_size - 1 - len(tokens) - len(merges)
    merges += [merge for merge, _ in zip(triples, range(room), strict=False)]
    tokens += [first + second for first, second in merges]
    tokenizer = Tokenizer(BPE({token: token_id for token_id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
    fast.save_pretrained(folder)
