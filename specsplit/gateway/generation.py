"""Runs the answers to one HTTP request side by side and hands on their chunks as they come. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Chunk, Request

MAX_AT_ONCE = 8
"""Answers to one HTTP request that run at once; the others wait, so that no request fills a worker's queue alone."""
Answer = tuple[int, Chunk]
"""A chunk, and the index of the answer that it belongs to."""


async def chunks_of(orchestrator: Orchestrator, requests: Sequence[Request]) -> AsyncGenerator[Answer]:
    """Yield the chunks of all requests; iterate inside `contextlib.aclosing`, whose end frees all slots.

    Raises what `Orchestrator.stream` raises; the first error ends all of the requests.
    """
    if len(requests) == 1:
        async with aclosing(orchestrator.stream(requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    # One place: an answer whose chunks nobody takes does not run ahead.
    ready: asyncio.Queue[Answer | Exception | None] = asyncio.Queue(1)
    turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(index: int, request: Request) -> None:
        try:
            async with turns, aclosing(orchestrator.stream(request)) as chunks:
                async for chunk in chunks:
                    await ready.put((index, chunk))
            await ready.put(None)
        except Exception as error:  # noqa: BLE001 - raised by whoever takes it
            await ready.put(error)

    tasks = [asyncio.create_task(run(index, request)) for index, request in enumerate(requests)]
    num_running = len(tasks)
    try:
        while num_running:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
