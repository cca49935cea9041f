"""Readers of a gateway's streams: they compare every text, and note failures and the longest time without a word."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from specsplit import Pipeline
from tests.chaos.farm import MODEL

_PROMPTS = (
    "def add(a, b):\n",
    "class Stack:\n",
    "import os\n\n\ndef walk(path):\n",
    "x = [1, 2, 3]\nfor y in x:\n    ",
)
_LENGTHS, _TEMPERATURES = (16, 48, 96), (0.0, 1.0)
_LIMIT_S = 120.0
_MOST_MESSAGES = 20
_NOBODY = "connection refused"
"""The error of a request for which nobody listened."""
_LOST = "connection lost"
"""The error of a request whose gateway ended."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A request that is sent again and again: its text is always the same."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self) -> dict[str, Any]:
        own = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return {"model": MODEL, "stream": True, "ignore_eos": True, **own}


def expected_texts() -> Mapping[Kind, str]:
    """Return the requests, each with its text by plain decoding in this process."""
    kinds = [
        Kind(prompt, length, temperature, seed)
        for seed, prompt in enumerate(_PROMPTS)
        for length in _LENGTHS
        for temperature in _TEMPERATURES
    ]
    with Pipeline(mode="plain", dtype="fp32") as pipeline:
        return {
            kind: pipeline.generate(
                kind.prompt,
                max_new_tokens=kind.max_tokens,
                temperature=kind.temperature,
                seed=kind.seed,
                ignore_eos=True,
            ).text
            for kind in kinds
        }


@dataclass
class Notes:
    """What readers noticed."""

    num_right: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failures: Counter[str] = field(default_factory=Counter[str])
    """Requests that ended with an error, by its code."""
    messages: list[str] = field(default_factory=list[str])
    """The first errors, whole."""
    num_refused: int = 0
    """Connections that nobody accepted."""
    num_unexplained: int = 0
    """Those of them for which no fault had taken the gateway away."""
    untyped: list[str] = field(default_factory=list[str])
    num_requests: int = 0
    """Requests that have come to their end, well or not."""
    silences: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When a reader had a word again, and after how many seconds."""


async def read_on(
    urls: Sequence[str],
    expected: Mapping[Kind, str],
    notes: Notes,
    has_ended: asyncio.Event,
    seed: int,
    headers: Mapping[str, str] | None = None,
    outage: Callable[[], str | None] = lambda: None,
) -> None:
    """Send requests one after the other until the end, and compare their texts.

    Each goes to one of `urls`, and to the next one only if nobody listens there; nothing else is tried again. `outage`
    says by which fault the gateway is away: "kill" may break any connection, "restart" one on which no answer has
    begun (it was kept from an earlier request, and closed as this one was sent), and no other may break.
    """
    rng, kinds = random.Random(seed), sorted(expected, key=repr)
    async with httpx.AsyncClient(timeout=_LIMIT_S, headers=headers) as client:
        while not has_ended.is_set():
            kind = rng.choice(kinds)
            texts, error = [], None
            for url in rng.sample(urls, len(urls)):
                texts, error = await _read(client, url, kind, notes, outage)
                if error != _NOBODY:
                    break
                notes.num_refused += 1
            notes.num_requests += 1
            if error is not None:
                notes.failures[error] += 1
                await asyncio.sleep(rng.uniform(0.1, 0.5))
            elif "".join(texts) == expected[kind]:
                notes.num_right += 1
            else:
                notes.wrong.append({"request": kind.body(), "text": "".join(texts), "expected": expected[kind]})
            if error is not None and not expected[kind].startswith("".join(texts)):
                notes.wrong.append({"request": kind.body(), "beginning": "".join(texts), "expected": expected[kind]})


async def _read(
    client: httpx.AsyncClient, url: str, kind: Kind, notes: Notes, outage: Callable[[], str | None]
) -> tuple[Sequence[str], str | None]:
    """Return the pieces of the text, and the code of the error that ended it, if one did."""
    loop, texts = asyncio.get_running_loop(), list[str]()
    last_s, reason, has_answer = loop.time(), None, False
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=kind.body()) as answer:
            has_answer = True
            if answer.status_code != 200:
                return [], _code(json.loads(await answer.aread()), notes)
            async for line in answer.aiter_lines():
                now_s = loop.time()
                notes.silences.append((now_s, now_s - last_s))
                last_s = now_s
                content = line.removeprefix("data: ")
                if content == line or content == "[DONE]":
                    continue  # a comment, or the line between two events
                event = json.loads(content)
                if "error" in event:
                    return texts, _code(event, notes)
                for choice in event["choices"]:
                    texts.append(choice["text"])
                    reason = choice["finish_reason"] or reason
    except (httpx.HTTPError, ValueError) as error:
        return texts, _broken(error, notes, outage(), has_answer=has_answer)
    finally:
        notes.silences.append((loop.time(), loop.time() - last_s))
    if reason is None:
        notes.untyped.append("a stream ended without a reason")
        return texts, "no finish_reason"
    return texts, None


def _broken(error: Exception, notes: Notes, outage: str | None, *, has_answer: bool) -> str:
    """Return the code of a connection that was refused or broke, for which the gateway has to be away."""
    if isinstance(error, httpx.ConnectError):
        notes.num_unexplained += outage is None
        return _NOBODY
    is_excused = outage == "kill" or (outage == "restart" and not has_answer)
    if is_excused and isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return _LOST
    notes.untyped.append(f"{type(error).__name__}: {error}")
    return type(error).__name__


def _code(body: Mapping[str, Any], notes: Notes) -> str:
    error = body.get("error") or {}
    if len(notes.messages) < _MOST_MESSAGES:
        notes.messages.append(f"{time.strftime('%H:%M:%S')} {error}")
    if not error.get("code") or not error.get("message"):
        notes.untyped.append(json.dumps(body))
    return str(error.get("code"))
