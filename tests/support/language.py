"""A tiny language whose next token is a hash of everything before it, its tokenizer, and what drafts guess of it.

The truth that fake workers and the tests of their orchestrators share; made without any of either.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from specsplit.core.ports import ChatMessage, Variables
from specsplit.core.types import Scores, SessionParams, Timings, TokenLogProb, prefix_hash

EOS = 256
TOKENS: tuple[bytes, ...] = (
    *(bytes([value]) for value in range(256)),
    b"",  # EOS: a special token without text
    b"ab",
    b"END",
    "\N{EURO SIGN}".encode()[:2],  # a token that ends within a character
    b"b END a",
    "\N{GRINNING FACE}".encode(),
)
VOCAB_SIZE = len(TOKENS)
UNITS = (*b"ab EN", "é".encode()[0], "€".encode()[0], "😀".encode()[0], 0xFF, *range(EOS + 1, VOCAB_SIZE))
"""Tokens that may follow a whole character; some begin one, and one byte never belongs to any."""
CHARACTERS = tuple(character.encode() for character in "é€😀")


class FakeTokenizer:
    """Bytes, and a few tokens of several bytes or of half a character."""

    eos_ids = (EOS,)
    vocab_hash = "bytes"
    hash = "bytes1"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_messages(
        self, messages: Sequence[ChatMessage], variables: Variables | None = None, *, continues: bool = False
    ) -> list[int]:
        names = [f" {message['name']}" if "name" in message else "" for message in messages]
        lines = [f"{each['role']}{name}: {each['content']}\n" for each, name in zip(messages, names, strict=True)]
        return self.encode("".join([*lines, *(f"{name}={value}\n" for name, value in (variables or {}).items())]))

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(TOKENS[token_id] for token_id in token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id]

    def fallback_byte(self, token_id: int) -> bytes:
        return b""


class WindowedTokenizer(FakeTokenizer):
    """The same, whose tokens' bytes nobody can say: text comes of decoding windows."""

    token_bytes = None


class BlankDroppingTokenizer(WindowedTokenizer):
    """The same, which drops a text's first blank, as tokenizers of Llama 2's kind do."""

    def token_text(self, token_id: int) -> str:
        return super().decode([token_id])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids).removeprefix(" ")


def next_token(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> int:
    """Return the target's pick: a hash of seed, choice and prefix; mostly well-formed UTF-8, EOS now and then."""
    chance = zlib.crc32(f"{params.seed} {params.choice} {prefix}".encode())
    tail = b"".join(TOKENS[token] for token in last_tokens[-3:])
    if chance % 8:
        for character in CHARACTERS:
            for done in range(len(character) - 1, 0, -1):
                if tail.endswith(character[:done]):
                    return character[done]
    chance //= 8
    return EOS if chance % 24 == 0 else UNITS[chance // 24 % len(UNITS)]


def plain_tokens(params: SessionParams, prompt: Sequence[int], count: int) -> list[int]:
    """Return what the language says after `prompt`, ends ignored: the truth, made without any orchestrator."""
    ids, prefix = list(prompt), prefix_hash(prompt)
    for _ in range(count):
        ids.append(next_token(params, prefix, ids))
        prefix = prefix_hash(ids[-1:], prefix)
    return ids[len(prompt) :]


Biases = Sequence[tuple[int, float]]


def log_probs(prefix: int, ids: Sequence[int], logit_bias: Biases) -> list[float]:
    """Return the log-probability of every token after `ids`: the greedy pick is likely, the others are alike."""
    logits = [0.0] * VOCAB_SIZE
    logits[next_token(SessionParams(), prefix, ids)] = 6.0
    for token_id, bias in logit_bias:
        if token_id < VOCAB_SIZE:
            logits[token_id] += bias
    most = max(logits)
    log_sum = most + math.log(sum(math.exp(logit - most) for logit in logits))
    return [logit - log_sum for logit in logits]


def token_log_prob(log_probs: Sequence[float], token_id: int, top: int) -> TokenLogProb:
    """Return what a target answers for one token of `log_probs`, in float32."""
    values = np.float32(log_probs).tolist()
    best = sorted(range(len(values)), key=lambda other: (-values[other], other))[:top]
    return TokenLogProb(values[token_id], tuple((other, values[other]) for other in best))


def scores_of(log_probs: Sequence[float], timings: Timings) -> Scores:
    """Return scores without likeliest tokens."""
    return Scores(tuple(map(TokenLogProb, log_probs)), timings)


Guess = Callable[[SessionParams, int, Sequence[int]], tuple[int, ...]]
"""Candidates for the next token, best first, given the prefix hash and the last tokens."""


def good_guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the target's pick first, or second, or not at all."""
    pick = next_token(params, prefix, last_tokens)
    other, third = (pick + 1) % VOCAB_SIZE, (pick + 2) % VOCAB_SIZE
    chance = zlib.crc32(f"draft {prefix}".encode()) % 10
    return (pick, other, third) if chance < 6 else (other, pick, third) if chance < 9 else (other, third)


def perfect_guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
    pick = next_token(params, prefix, last_tokens)
    return (pick, (pick + 1) % VOCAB_SIZE, (pick + 2) % VOCAB_SIZE)


def random_guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
    chance = zlib.crc32(f"random {prefix}".encode())
    return (UNITS[chance % len(UNITS)], chance % VOCAB_SIZE, chance // 512 % VOCAB_SIZE)


def adversarial_guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return wrong tokens and twins; now and then the right one twice, so that either twin's subtree may be true."""
    pick = next_token(params, prefix, last_tokens)
    wrong = (pick + 7) % VOCAB_SIZE
    return (pick, pick, wrong) if prefix % 3 == 0 else (wrong, wrong, EOS)


def empty_guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
    return ()
