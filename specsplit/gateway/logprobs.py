"""Log-probabilities in OpenAI's two forms: lists side by side for completions, objects for chat completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from specsplit.core.ports import Tokenizer
from specsplit.core.types import TokenLogProb
from specsplit.orchestrator.text import Detokenizer


class TokenEntry(NamedTuple):
    """A token as a client sees it."""

    token_id: int
    found: TokenLogProb | None
    """None for a prompt's first token, which nothing precedes."""
    offset: int
    """The character of the text with which it begins."""


class TextOffsets:
    """Finds the places of a text's tokens, in order; the first one begins at `start`, behind the tokens of `before`.

    They follow from the tokens alone, not from how much text is held back: a token that ends a character is at the
    place of that character, as the one that begins it, and a token behind the end of the text is where it would be.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, text: str = "", before: Sequence[int] = ()) -> None:
        self._tokenizer, self._text, self._offset = tokenizer, text, start
        """`text` is known for prompts only."""
        self._complete = _completed_text(tokenizer, before)

    def entries(self, token_ids: Iterable[int], found: Iterable[TokenLogProb | None]) -> list[TokenEntry]:
        """Return the entries of the next tokens."""
        made: list[TokenEntry] = []
        for token_id, each in zip(token_ids, found, strict=True):
            made.append(TokenEntry(token_id, each, self._offset))
            self._offset += len(self._complete(token_id)) or self._length_of_control(token_id)
        return made

    def _length_of_control(self, token_id: int) -> int:
        """Return the length of a control token, which is no text, but may have been written out in a prompt."""
        if not self._text or self._tokenizer.decode([token_id, token_id]):
            return 0  # a part of a character, or the blank before a text's first word, which decoders drop
        name = self._tokenizer.token_text(token_id)
        return len(name) if self._text.startswith(name, self._offset) else 0


def _completed_text(tokenizer: Tokenizer, before: Sequence[int]) -> Callable[[int], str]:
    """Return what tells the text that each token in turn completes behind those of `before`."""
    token_bytes = tokenizer.token_bytes
    if token_bytes is None:
        return Detokenizer(tokenizer.decode, before).push
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda token_id: decoder.decode(token_bytes(token_id))


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """Return the entries as lists."""
    return {
        "tokens": [_unique_text(tokenizer, entry.token_id) for entry in entries],
        "token_logprobs": [None if entry.found is None else entry.found.log_prob for entry in entries],
        "top_logprobs": [
            None if entry.found is None else _top(tokenizer, entry.token_id, entry.found) for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def _top(tokenizer: Tokenizer, token_id: int, entry: TokenLogProb) -> dict[str, float]:
    """Return the likeliest tokens, and the token itself if it is not among them."""
    # OpenAI's form is keyed by text; of two tokens with one text the likelier one stays.
    top: dict[str, float] = {}
    for likely_id, log_prob in (*entry.top, (token_id, entry.log_prob)):
        top.setdefault(_unique_text(tokenizer, likely_id), log_prob)
    return top


def _unique_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; for a part of a character its bytes, in the way in which OpenAI writes them."""
    data = _bytes_of(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenEntry]) -> dict[str, Any]:
    """Return the entries as objects, each with its likeliest tokens."""
    content = [
        {
            **_chat_entry(tokenizer, entry.token_id, entry.found.log_prob),
            "top_logprobs": [_chat_entry(tokenizer, likely_id, log_prob) for likely_id, log_prob in entry.found.top],
        }
        for entry in entries
        if entry.found is not None
    ]
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, log_prob: float) -> dict[str, Any]:
    data = _bytes_of(tokenizer, token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": log_prob, "bytes": list(data)}


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return what a token adds to a text in UTF-8; for a special token, its name."""
    token_bytes = tokenizer.token_bytes or tokenizer.fallback_byte
    data = token_bytes(token_id)
    return data or tokenizer.token_text(token_id).encode()
