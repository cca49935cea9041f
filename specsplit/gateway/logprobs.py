"""Log-probabilities in OpenAI's two forms: lists side by side for completions, objects for chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specsplit.core.ports import Tokenizer
from specsplit.core.types import TokenLogProb

TokenEntry = tuple[int, TokenLogProb | None]
"""A token and its log-probability; None for a prompt's first token, which nothing precedes."""


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry], offset: int) -> dict[str, Any]:
    """Return the entries as lists; the first token begins at `offset` of the answer's text."""
    texts = [_unique_text(tokenizer, token_id) for token_id, _ in entries]
    offsets: list[int] = []
    for token_id, _ in entries:
        offsets.append(offset)
        offset += len(tokenizer.token_text(token_id))
    return {
        "tokens": texts,
        "token_logprobs": [None if entry is None else entry.log_prob for _, entry in entries],
        "top_logprobs": [None if entry is None else _top(tokenizer, token_id, entry) for token_id, entry in entries],
        "text_offset": offsets,
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
            **_chat_entry(tokenizer, token_id, entry.log_prob),
            "top_logprobs": [_chat_entry(tokenizer, likely_id, log_prob) for likely_id, log_prob in entry.top],
        }
        for token_id, entry in entries
        if entry is not None
    ]
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, log_prob: float) -> dict[str, Any]:
    data = _bytes_of(tokenizer, token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": log_prob, "bytes": list(data)}


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return what a token adds to a text in UTF-8; for a special token, its name."""
    data = tokenizer.token_bytes(token_id) if tokenizer.token_bytes is not None else b""
    return data or tokenizer.token_text(token_id).encode()
