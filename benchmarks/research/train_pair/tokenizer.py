"""The pair's tokenizer: byte-level BPE in which a line break and the indentation after it are one token.

Knows no model. Its only special token stands between files, and ends and begins a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.research.train_pair.files import write_whole

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
PATTERN = r"\n[\n ]*| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?= )|\s+"
"""Line break with indentation; word; up to three digits; signs; blanks before the last one; other whitespace.

No sign is glued to a line break, so that a prompt may end at a colon.
"""
SAMPLE_BYTES = 40_000_000
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""Messages below each other: the pair follows no instructions, so a chat is a text that it continues."""


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer with `vocab_size` entries, trained on the first 40 MB of `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, SAMPLE_BYTES), trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    return tokenizer


def _first(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    size = 0
    for text in texts:
        size += len(text)
        if size > max_bytes:
            return
        yield text


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write the tokenizer as one JSON file."""
    write_whole(path, tokenizer.to_str().encode())


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def save_for_transformers(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the files that AutoTokenizer reads."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=context,
    )
    wrapped.save_pretrained(folder, save_jinja_files=False)  # the template in the file that every loader reads


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], batch: int = 1000) -> Iterator[list[int]]:
    """Yield the ids of each text, the end-of-text token last."""
    for start in range(0, len(texts), batch):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + batch], add_special_tokens=False):
            yield [*encoding.ids, END_OF_TEXT_ID]


def bytes_of_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return how many bytes of text each token stands for; none for the end of a text."""
    alphabet = [tokenizer.id_to_token(token_id) or "" for token_id in range(tokenizer.get_vocab_size())]
    return [0 if token == END_OF_TEXT else len(token) for token in alphabet]
