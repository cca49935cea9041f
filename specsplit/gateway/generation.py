"""Runs the answers to one HTTP request side by side and hands on their chunks as they come. Knows no HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from specsplit.core.errors import Overloaded
from specsplit.limits import MAX_REFUSED_S
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Chunk, Request

T = TypeVar("T")
MAX_AT_ONCE = 8
"""Answers to one HTTP request that run or wait in a worker's queue; the others wait here, so that no request fills a
queue of the usual length alone."""
IndexedChunk = tuple[int, Chunk]
"""A chunk, and the index of the answer that it belongs to."""


async def chunks_of(orchestrator: Orchestrator, requests: Sequence[Request]) -> AsyncGenerator[IndexedChunk]:
    """Yield the chunks of all requests; iterate inside `contextlib.aclosing`, whose end frees all slots.

    Raises what `Orchestrator.stream` raises; the first error ends all of the requests. A full worker's refusal is an
    error only if none of them has begun.
    """
    if len(requests) == 1:
        async with aclosing(_to_result(orchestrator, requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    # One place: an answer whose chunks nobody takes does not run ahead.
    ready: asyncio.Queue[IndexedChunk | Exception | None] = asyncio.Queue(1)
    turns, admission = _Turns(), _SharedAdmission(_end_s(orchestrator, requests[0]))

    async def run(index: int, request: Request) -> None:
        try:
            answer = admission.admitted(partial(_to_result, orchestrator, request))
            async with turns.of(request) as has_begun, aclosing(answer) as chunks:
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


def _end_s(orchestrator: Orchestrator, request: Request) -> float:
    """Return the loop's time at which a request is given up."""
    timeout_s = orchestrator.retry_policy.timeout_s if request.timeout_s is None else request.timeout_s
    began_s = asyncio.get_running_loop().time() if request.began_s is None else request.began_s
    return math.inf if timeout_s is None else began_s + timeout_s


async def admitted(
    begin: Callable[[], AsyncGenerator[T]], pause: Callable[[Overloaded], Awaitable[None]]
) -> AsyncGenerator[T]:
    """Yield what `begin()` yields; while the worker's queue is full, begin again after each `pause`.

    A worker refuses before the first item only.

    Raises:
        Overloaded: `pause` raised it, or the queue was full for MAX_REFUSED_S.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + MAX_REFUSED_S
    while True:
        try:
            async with aclosing(begin()) as items:
                async for item in items:
                    yield item
        except Overloaded as error:
            if loop.time() + error.retry_after_s > end_s:
                raise
            await pause(error)
        else:
            return


class _SharedAdmission:
    """Has an answer that a full worker refuses wait while its siblings, the other answers to one request, go on.

    Its refusal would throw away what they have done. And an idle worker with fewer places than answers would refuse the
    request for ever.
    """

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s
        self._num_admissible, self._has_begun = 0, False  # answers that no worker has refused last
        self._ended = asyncio.Condition()

    async def admitted(self, begin: Callable[[], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        """Yield what `begin()` yields, as soon as a worker lets it.

        Raises:
            Overloaded: the worker's queue is full, and no sibling has begun, or waits in it.
        """
        self._num_admissible += 1
        async with aclosing(admitted(begin, self._pause)) as items:
            async for item in items:
                self._has_begun = True
                yield item
        async with self._ended:
            self._ended.notify()

    async def _pause(self, error: Overloaded) -> None:
        """Wait until a sibling ends, whose slot is free then, or for as long as the worker says."""
        self._num_admissible -= 1
        if not self._has_begun and not self._num_admissible:
            raise error
        again_s = asyncio.get_running_loop().time() + error.retry_after_s
        with suppress(TimeoutError):
            async with self._ended, asyncio.timeout_at(min(again_s, self._end_s)):
                await self._ended.wait()
        self._num_admissible += 1


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
