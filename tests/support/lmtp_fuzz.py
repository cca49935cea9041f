"""Frames that no client of LMTP should send, and some that one may."""

from __future__ import annotations

import json
import random
from typing import Any

_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 0.5, 1e308, 2**31, 2**63, 2**70, float("nan"), float("inf")),
    *("", "x", "embedded", "\ud800", "\0", "é" * 50),
    *([], [1], [None], [1, "x"], [2**40], [[1]], {}, {"1": 2}, {"x": 1}, {"-1": 1}, {"5": 1e300}),
)
_NAMES = (
    *("prompt", "scored", "stream_id", "model", "max_tokens", "temperature", "logit_bias", "top_logprobs", "seed"),
    *("x_resume_from", "top_p", "top_k", "min_p", "ignore_eos", "presence_penalty", "repetition_penalty", "data"),
)
_COMMANDS = ("GENERATE", "GENERATE", "SCORE", "MODEL_INFO", "TOKEN", "MSG", "SYS", "generate", "")


def fuzzed_frame(rng: random.Random) -> str:
    """Return a frame; it has no line breaks, which would make two of it over pipes."""
    fields: dict[str, Any] = {
        "stream_id": rng.randrange(50),
        "prompt": rng.choice(([1], "ab", [2, 3])),
        "max_tokens": 2,
    }
    if rng.random() < 0.5:
        fields["scored"] = rng.choice(([1, 2], "cd"))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        fields[rng.choice(_NAMES)] = rng.choice(_VALUES)
    if isinstance(fields.get("max_tokens"), int) and fields["max_tokens"] > 4:
        fields["max_tokens"] = 4
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        fields.pop(rng.choice(list(fields)), None) if fields else None
    frame = f"{rng.choice(_COMMANDS)} {json.dumps(fields, ensure_ascii=True)}"
    damage = rng.randrange(10)
    if damage < 3:
        at = rng.randrange(len(frame))
        frame = frame[:at] + chr(rng.randrange(0x20, 0x300)) + frame[at + rng.randint(0, 2) :]
    elif damage == 3:
        frame = frame[: rng.randrange(len(frame))]
    elif damage == 4:
        frame = frame.replace("[", "[" * rng.choice((2, 50_000)), 1)
    return frame
