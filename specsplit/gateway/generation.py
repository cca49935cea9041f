"""Runs the answers to one HTTP request side by side and hands on their chunks as they come. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager

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
        async with aclosing(_to_result(orchestrator, requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    # One place: an answer whose chunks nobody takes does not run ahead.
    ready: asyncio.Queue[Answer | Exception | None] = asyncio.Queue(1)
    turns = _Turns()

    async def run(index: int, request: Request) -> None:
        try:
            async with turns.of(request) as has_begun, aclosing(_to_result(orchestrator, request)) as chunks:
                async for chunk in chunks:
                    has_begun.set()
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


async def _to_result(orchestrator: Orchestrator, request: Request) -> AsyncGenerator[Chunk]:
    """Yield the chunks of one request, and end with its result, while the workers still free its slots."""
    async with aclosing(orchestrator.stream(request)) as chunks:
        async for chunk in chunks:
            yield chunk
            if chunk.result is not None:
                return


class _Turns:
    """Lets MAX_AT_ONCE answers run, and the first one to each prompt before its others, which begin with its rows."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._begun: dict[tuple[int, ...], asyncio.Event] = {}

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncGenerator[asyncio.Event]:
        """Give an answer its turn, and the event that it sets with its first chunk."""
        is_first = request.prompt_ids not in self._begun
        has_begun = self._begun.setdefault(request.prompt_ids, asyncio.Event())
        if not is_first:
            await has_begun.wait()
        async with self._places:
            yield has_begun
