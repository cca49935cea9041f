"""A steady mixed load on a gateway: short, long and whole answers, chats, scores, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from tests.chaos.farm import MODEL

_LIMIT_S = 300.0
MOST_AT_ONCE = 8
"""As many as one target has sessions."""
_MOST_LINES = 40
_MOST_EVENTS = 6
"""The most that a client reads which leaves."""
_MODES = ("auto", "plain", "pingpong", "overlap", "stream")
Body = dict[str, Any]
Ask = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]


class Failed(Exception):
    """A request that did not come to its end."""


@dataclass
class Counts:
    """What became of the requests of a load."""

    ended: Counter[str] = field(default_factory=Counter[str])
    """Requests that went well, by their kind."""
    failures: Counter[str] = field(default_factory=Counter[str])
    num_skipped: int = 0
    """Requests that were not sent, since MOST_AT_ONCE were under way."""


async def load(url: str, rng: random.Random, requests_per_s: float, lasts_s: float, counts: Counts) -> None:
    """Send requests, which arrive by a Poisson process, for `lasts_s` seconds, and wait for their ends.

    At most MOST_AT_ONCE are under way: a machine that does other work, too, is not to be overloaded.
    """
    loop = asyncio.get_running_loop()
    due_s, end_s = loop.time(), loop.time() + lasts_s
    under_way = set[asyncio.Task[None]]()
    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S) as client, asyncio.TaskGroup() as group:
        while (due_s := due_s + rng.expovariate(requests_per_s)) < end_s:
            await asyncio.sleep(due_s - loop.time())
            kind, own = rng.choice(sorted(_KINDS)), random.Random(rng.random())
            if len(under_way) == MOST_AT_ONCE:
                counts.num_skipped += 1
                continue
            under_way.add(task := group.create_task(_count(kind, client, own, counts)))
            task.add_done_callback(under_way.discard)


async def fill(url: str, rng: random.Random, counts: Counts) -> None:
    """Have every slot hold as many rows as a request of the load has: rows take memory when they are first written."""
    for _ in range(2):
        async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S) as client, asyncio.TaskGroup() as group:
            for _ in range(2 * MOST_AT_ONCE):
                group.create_task(_count("fill", client, random.Random(rng.random()), counts))


async def _count(kind: str, client: httpx.AsyncClient, rng: random.Random, counts: Counts) -> None:
    try:
        await (_fill if kind == "fill" else _KINDS[kind])(client, rng)
    except (httpx.HTTPError, Failed) as error:
        counts.failures[f"{kind}: {type(error).__name__}: {error}"] += 1
    else:
        counts.ended[kind] += 1


def _prompt(rng: random.Random, num_lines: int) -> str:
    """Return a prompt that was never sent before."""
    lines = [f"    value_{rng.randrange(10**6)} = a + {rng.randrange(100)} * b\n" for _ in range(num_lines)]
    return f"def compute_{rng.randrange(10**9)}(a, b):\n" + "".join(lines)


def _body(rng: random.Random, num_lines: int, max_tokens: int, **others: Any) -> Body:
    own = {"model": MODEL, "prompt": _prompt(rng, num_lines), "max_tokens": max_tokens, "ignore_eos": True}
    drawn = {
        "temperature": rng.choice((0.0, 1.0)),
        "seed": rng.randrange(10**6),
        "speculative": {"mode": rng.choice(_MODES)},
    }
    return {**own, **drawn, **others}


async def _short(client: httpx.AsyncClient, rng: random.Random) -> None:
    await _stream(client, "completions", _body(rng, 1, rng.randrange(4, 16)))


async def _long(client: httpx.AsyncClient, rng: random.Random) -> None:
    await _stream(client, "completions", _body(rng, rng.randrange(8, _MOST_LINES), 96))


async def _fill(client: httpx.AsyncClient, rng: random.Random) -> None:
    await _stream(client, "completions", _body(rng, _MOST_LINES, 96))


async def _whole(client: httpx.AsyncClient, rng: random.Random) -> None:
    await _post(client, _body(rng, 2, 24, n=2))


async def _score(client: httpx.AsyncClient, rng: random.Random) -> None:
    await _post(client, _body(rng, rng.randrange(1, 8), 0, echo=True, logprobs=1))


async def _chat(client: httpx.AsyncClient, rng: random.Random) -> None:
    messages = [{"role": "user", "content": _prompt(rng, 2)}]
    await _stream(client, "chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 24})


async def _leave(client: httpx.AsyncClient, rng: random.Random) -> None:
    await _stream(client, "completions", _body(rng, rng.randrange(1, 30), 400), rng.randrange(_MOST_EVENTS))


_KINDS: Mapping[str, Ask] = {
    "short": _short,
    "long": _long,
    "whole": _whole,
    "score": _score,
    "chat": _chat,
    "leave": _leave,
}


async def _post(client: httpx.AsyncClient, body: Body) -> None:
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise Failed(_code(answer.content))


async def _stream(client: httpx.AsyncClient, path: str, body: Body, num_events: int | None = None) -> None:
    """Read a stream to its end, or leave it after `num_events`."""
    async with client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise Failed(_code(await answer.aread()))
        num_read, last = 0, ""
        async for line in answer.aiter_lines():
            if num_read == num_events:
                return
            if line.startswith('data: {"error"'):
                raise Failed(_code(line.removeprefix("data: ").encode()))
            num_read += line.startswith("data: ")
            last = line or last
    if last != "data: [DONE]":
        raise Failed("the stream ended early")


def _code(content: bytes) -> str:
    return str(json.loads(content)["error"]["code"])
