"""Requests that no client should send, and some that one may: drawn from fields, values and damage of all kinds."""

from __future__ import annotations

import json
import random
from typing import Any

_PATHS = (
    "/v1/completions",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
)
_FIELDS = (
    *(
        "prompt",
        "messages",
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stop",
        "seed",
        "stream",
    ),
    *("echo", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *(
        "stream_options",
        "ignore_eos",
        "priority",
        "speculative",
        "tokens",
        "best_of",
        "tools",
        "response_format",
        "user",
    ),
    *("max_completion_tokens", "metadata", "suffix", "role", "content", "name", "unheard_of"),
    *("chat_template_kwargs", "reasoning_effort"),
)
_STRINGS = (
    "",
    "x",
    "embedded",
    "user",
    "\0",
    "\u202e",
    "a" * 300,
    "<|endoftext|>",
    "\N{GRINNING FACE}",
    "def f():\n",
    "[1]",
)
_NUMBERS = (0, 1, -1, 2, 0.5, 20, 1e-300, 1e300, 2**31, 2**63, 2**64, -(2**63), 10**40, 10**400, 4095, 4096, -0.0)


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind < 2:
        return rng.choice(_STRINGS)
    if kind < 4:
        return rng.choice(_NUMBERS)
    if kind == 4:
        return rng.choice((True, False, None))
    if kind == 5:
        return rng.randrange(-5, 5000)
    if kind == 6:
        return {
            rng.choice((*_FIELDS, *_STRINGS, "trace", "mode", "include_usage")): _value(rng, depth + 1)
            for _ in range(3)
        }
    return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]


def _plausible(rng: random.Random, path: str) -> dict[str, Any]:
    message = {"role": rng.choice(("user", "assistant", "system")), "content": rng.choice(_STRINGS)}
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": rng.choice((*_STRINGS, [1, 2], [[3], [4]], ["a", "b"])), "max_tokens": 2},
        "/v1/chat/completions": {"messages": [message] * rng.randrange(1, 3), "max_tokens": 2},
        "/tokenize": {"prompt": rng.choice(_STRINGS)},
        "/detokenize": {"tokens": [rng.randrange(4096) for _ in range(3)]},
    }[path]
    return body


def fuzzed_request(rng: random.Random) -> tuple[str, bytes, dict[str, bytes]]:
    """Return path, body and headers of one request."""
    path = rng.choice(_PATHS)
    body = _plausible(rng, path)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        body[rng.choice(_FIELDS)] = _value(rng)
    if isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 8:
        body["max_tokens"] = 8
    content = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    damage = rng.randrange(12)
    if damage == 0:
        place = rng.randrange(len(content))
        content = content[:place] + rng.randbytes(rng.randrange(3)) + content[place + rng.randrange(3) :]
    elif damage == 1:
        content = content[: rng.randrange(len(content))]
    elif damage == 2:
        content = content.replace(
            b"2", rng.choice((b"NaN", b"-Infinity", b"1e999", b"02", b"[" * 5000, b'"\\ud800"')), 1
        )
    elif damage == 3:
        content = rng.randbytes(rng.randrange(50))
    media_type = rng.choice((b"application/json",) * 9 + (b"text/plain", b"application/json; charset=latin-1"))
    return path, content, {"content-type": media_type, "x-request-id": rng.choice((b"a", b"\xe9", b"x" * 500, b""))}
