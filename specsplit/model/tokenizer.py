"""The Tokenizer port over a transformers tokenizer, loaded with a model or made from the files that a worker sent.

Imports no torch: an orchestrator has none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it complains where there is no torch
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specsplit.core.errors import ModelDamaged, ResourceError
from specsplit.core.ports import ChatMessage
from specsplit.core.types import TokenizerFiles
from specsplit.model.chat_template import ChatTemplate
from specsplit.model.identity import MAX_TOKENIZER_BYTES, files_hash, place_of, read_tokenizer_files

_NO_LIMIT = 1 << 62


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    A printable byte is its own letter; the others have the letters from 256 on, in their order.
    """
    # GPT-2's table: spaces, control bytes and the soft hyphen (0xAD) are not printable.
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES_OF_LETTERS = _bytes_of_letters()


class _TokenBytes(dict[int, bytes]):
    """Each token's bytes in the text, for a byte-level vocabulary, looked up once."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._looked_up(token_id)
        return found

    def _looked_up(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        added = self._backend.get_added_tokens_decoder().get(token_id)
        if token is None or (added is not None and added.special):
            return b""
        try:
            return bytes([_BYTES_OF_LETTERS[letter] for letter in token])
        except KeyError:  # a token that was added to the vocabulary as it is
            return token.encode()


class TransformersTokenizer:
    """Text to ids and back; `eos_ids` join the tokenizer's and the generation config's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        tokenizer.model_max_length = _NO_LIMIT  # the context is checked where it is known, not by a warning here
        own: int | None = tokenizer.eos_token_id  # type: ignore[assignment]
        all_ids: list[int] = [*eos_ids, *([] if own is None else [own])]
        self._eos_ids = tuple(sorted(set(all_ids)))
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        self._vocab_hash = hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]
        self.num_tokens = len(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        """The tokenizer in Rust, without the Python around it that every token would pay for."""
        is_byte_level = self._backend is not None and isinstance(self._backend.decoder, ByteLevel)
        self._token_bytes = _TokenBytes(self._backend) if is_byte_level else None
        self._chat_template = ChatTemplate(tokenizer)
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._special_texts = {token_id: str(token) for token_id, token in added.items() if token.special}

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def vocab_hash(self) -> str:
        return self._vocab_hash

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_template.source)

    @property
    def is_for_chat(self) -> bool:
        """Whether the chat template tells who speaks: the model was hardly trained on texts without it then."""
        return "role" in self._chat_template.source

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens included."""
        return self._tokenizer.encode(text)

    def encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of a conversation by the chat template; nothing in a message becomes a control token.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses these messages.
        """
        return self._chat_template.encode(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens left out; incomplete UTF-8 becomes U+FFFD."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=True))
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def token_text(self, token_id: int) -> str:
        """Return the text of one token within a text, that of a special token included."""
        if token_id in self._special_texts:
            return self._special_texts[token_id]
        if self._token_bytes is not None:
            return self._token_bytes[token_id].decode(errors="replace")
        # Some decoders drop the blank before the first token, so another one stands before it.
        before = self.encode("a")[-1:]
        return self.decode([*before, token_id])[len(self.decode(before)) :]

    @property
    def token_bytes(self) -> Callable[[int], bytes] | None:
        """Each token's bytes in the text, for a byte-level vocabulary; None for others."""
        return None if self._token_bytes is None else self._token_bytes.__getitem__


def held_tokenizer_hash(folder: Path) -> str:
    """Return the hash of the tokenizer files that `tokenizer_from_files` left in `folder`, empty if there are none."""
    try:
        files = read_tokenizer_files(folder, str(folder)) if folder.is_dir() else {}
    except (ModelDamaged, OSError):
        return ""
    return files_hash(files) if files else ""


def tokenizer_from_files(files: TokenizerFiles, folder: Path) -> TransformersTokenizer:
    """Return the tokenizer that a worker sent; its files stay in `folder`, a folder of its own.

    Without files, it reads those that an earlier call left in `folder`. Code from a repository is never run.

    Raises:
        ModelDamaged: a name that leads elsewhere, other files than `files.hash` says, or no readable tokenizer.
        ResourceError: the folder cannot be written.
    """
    if files.files:
        _check_sent(files)
    if held_tokenizer_hash(folder) != files.hash:
        if not files.files:
            raise ModelDamaged(f"{folder} does not hold the tokenizer files of hash {files.hash}.")
        try:
            _write(files, folder)
        except OSError as error:
            raise ResourceError(f"The tokenizer's files cannot be written to {folder} ({error.strerror}).") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # over a bad file, transformers and tokenizers raise whatever they like
        reason = " ".join(str(error).split())[:200]
        raise ModelDamaged(f"The tokenizer that the target sent cannot be read ({reason}).") from error
    return TransformersTokenizer(tokenizer, files.eos_ids)


def _check_sent(files: TokenizerFiles) -> None:
    for name in files.files:
        place_of(name)
    if sum(map(len, files.files.values())) > MAX_TOKENIZER_BYTES:
        raise ModelDamaged(f"The tokenizer that the target sent exceeds {MAX_TOKENIZER_BYTES >> 20} MiB.")
    if files_hash(files.files) != files.hash:
        raise ModelDamaged("The tokenizer that the target sent is not the one that its hash names; ask again.")


def _write(files: TokenizerFiles, folder: Path) -> None:
    """Put all files in place at once, so that no process ever sees half of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        for name, content in files.files.items():
            path = new / place_of(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)  # it holds another tokenizer, or nothing
        # Two processes may come here at once: the loser's rename fails, and the winner's files are the same.
        try:
            new.rename(folder)
        except OSError:
            if held_tokenizer_hash(folder) != files.hash:
                raise
