"""The asyncio client: generates with workers that serve elsewhere, on the caller's own loop, without torch.

It needs the plain install. `Pipeline` is for models in this process, and for synchronous code.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack, cast, overload

from specsplit.assembly.arguments import (
    ClientOptions,
    ModelPath,
    Prompt,
    Prompts,
    RequestOptions,
    are_several,
    check_prompt,
    config_path,
    plain_settings,
)
from specsplit.assembly.links import remote_workers
from specsplit.assembly.requests import check_request_values, make_request, request_settings
from specsplit.assembly.workers import Workers
from specsplit.core.errors import InvalidRequest, InvalidSettings
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import load_settings
from specsplit.core.types import Scores
from specsplit.orchestrator.request import Chunk, Result

__all__ = ["Client", "ClientOptions", "Prompt", "RequestOptions"]


class Client:
    """A client of a target and perhaps a draft, each at HOST:PORT; connect it with `async with`.

    Any number of requests may run at once; the workers decide how many have a slot. Arguments override environment
    variables, these the settings file, and that the defaults.

    Raises:
        SpecSplitError: a setting is wrong; connecting also says if the target cannot be reached.
    """

    def __init__(
        self,
        target: str,
        draft: str | None = None,
        *,
        config: ModelPath | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        given = plain_settings({"target": target, "draft": draft, **options})
        self._settings = load_settings(given, config=config_path(config)).settings
        check_request_values(self._settings.orchestrator)
        if self._settings.target.address is None or self._settings.draft_source is not None:
            raise InvalidSettings("A Client has workers elsewhere, not models here; a Pipeline loads models.")
        self._workers: Workers | None = None
        self._scope = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._workers = await self._scope.enter_async_context(remote_workers(self._settings))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; requests under way fail. Closing again does nothing."""
        self._workers = None
        await self._scope.aclose()

    @overload
    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Result: ...
    @overload
    async def generate(self, prompt: Prompts, **options: Unpack[RequestOptions]) -> list[Result]: ...
    async def generate(self, prompt: Prompt | Prompts, **options: Unpack[RequestOptions]) -> Result | list[Result]:
        """Generate the whole answer to `prompt`: a text, token ids, or the messages of a conversation.

        Several prompts run at once, with equal options, and their answers are in the order of the prompts. If one
        fails, the others are ended and its error is raised.
        """
        if not are_several(prompt):
            return await _last_result(self.stream(cast("Prompt", prompt), **options))
        streams = [self.stream(each, **options) for each in prompt]
        tasks = [asyncio.ensure_future(_last_result(stream)) for stream in streams]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # Waited for, so that the slots of all of them are free when an error comes out of here.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is verified; the last chunk has the result. Closing the generator ends the request."""
        check_prompt(prompt)
        return self._stream(self._connected, prompt, request_settings(self._settings.orchestrator, options, prompt))

    async def score(self, prompt: Sequence[int], scored: Sequence[int], *, top_logprobs: int = 0) -> Scores:
        """Return the log-probability of each token of `scored` behind `prompt`, at temperature 1, within `timeout`.

        The prompt is computed once for several scores in a row, and not at all behind a request that began with it.
        """
        settings = self._settings.orchestrator
        orchestrator = self._connected.orchestrator(settings)
        return await orchestrator.score(prompt, scored, top_logprobs=top_logprobs, timeout_s=settings.timeout)

    @property
    def _connected(self) -> Workers:
        if self._workers is None:
            raise InvalidRequest("This client is not connected: use it in `async with Client(...) as client`.")
        return self._workers

    async def _stream(
        self, workers: Workers, prompt: Prompt, settings: OrchestratorSettings
    ) -> AsyncGenerator[Chunk, None]:
        began_s = asyncio.get_running_loop().time()
        # On a thread: the target's tokenizer has a process of its own, which may take seconds to start or to answer.
        request = await asyncio.to_thread(make_request, workers.tokenizer, prompt, settings)
        async with aclosing(workers.stream(replace(request, began_s=began_s), settings)) as chunks:
            async for chunk in chunks:
                yield chunk


async def _last_result(chunks: AsyncGenerator[Chunk, None]) -> Result:
    result = None
    async with aclosing(chunks):
        async for chunk in chunks:
            result = chunk.result
    assert result is not None, "the last chunk has the result"
    return result
