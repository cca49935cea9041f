"""The Tokenizer port over a transformers tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specsplit.core.errors import InvalidRequest

_NO_LIMIT = 1 << 62


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
        """The tokenizer itself, without the Python around it that every token would pay for."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def vocab_hash(self) -> str:
        return self._vocab_hash

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens included."""
        return self._tokenizer.encode(text)

    def encode_chat(self, user_message: str) -> list[int]:
        """Return the ids of the chat template around one user message.

        Raises:
            InvalidRequest: the model has no chat template.
        """
        if not self.has_chat_template:
            raise InvalidRequest("This model has no chat template; leave --chat out.", param="chat")
        messages = [{"role": "user", "content": user_message}]
        encoded: Any = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens left out; incomplete UTF-8 becomes U+FFFD."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=True))
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
