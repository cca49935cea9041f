"""The Python API: a Pipeline that generates text, from synchronous or asynchronous code.

Everything runs on one event loop in the pipeline's own thread, so it works in scripts, servers and notebooks alike, and
threads may share a pipeline. Requests run at once as far as there are slots; the others wait their turn.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Self, Unpack, cast, overload

from specsplit.assembly.arguments import (
    ModelPath,
    PipelineOptions,
    Prompt,
    Prompts,
    RequestOptions,
    are_several,
    check_prompt,
    config_path,
    plain_settings,
)
from specsplit.assembly.chunk_stream import ChunkStream, Deliver, raise_failure, refuse_elsewhere
from specsplit.assembly.generation_settings import generation_settings
from specsplit.assembly.loop_thread import CancellableTask, FinishedTask, LoopThread, join_ending
from specsplit.assembly.models import load_local
from specsplit.assembly.opening import open_workers
from specsplit.assembly.requests import RequestMaker, check_request_values, request_settings
from specsplit.assembly.workers import Workers
from specsplit.core.defaults import LOCAL_SESSIONS
from specsplit.core.errors import InvalidRequest
from specsplit.core.settings import OrchestratorSettings, Settings
from specsplit.orchestrator.request import Chunk, Result

__all__ = ["Pipeline", "PipelineOptions", "Prompt", "RequestOptions"]
_MOST_AT_ONCE = 128
"""Prompts of one list that a target elsewhere has at once: more than its slots, and less than fill its queue."""
_Turns = AbstractAsyncContextManager[None]


class Pipeline:
    """A target and perhaps a draft, ready to generate; close it, or use it in a with block.

    One that is dropped is closed soon after, and one that is open at exit is closed then.
    Without arguments it runs the embedded pair. `target_model` and `draft_model` are loaded here; `target` and `draft`
    are addresses, HOST:PORT, of workers that serve elsewhere; one may be here and the other there. A target without a
    draft speculates by lookup alone.
    Models loaded here have `sessions` KV slots, by default 8 or as many as the memory easily holds; that many requests
    run at once, and more wait for their turn by priority and arrival. A request's `timeout` counts from its turn.
    Arguments override environment variables, these the settings file, and that the defaults.

    Raises:
        SpecSplitError: a setting is wrong, a model cannot be loaded or a target not reached; the message has a remedy.
    """

    def __init__(
        self,
        target_model: ModelPath | None = None,
        draft_model: ModelPath | None = None,
        *,
        target: str | None = None,
        draft: str | None = None,
        config: ModelPath | None = None,
        **options: Unpack[PipelineOptions],
    ) -> None:
        named = {"target_model": target_model, "draft_model": draft_model, "target": target, "draft": draft, **options}
        self._open(generation_settings(plain_settings(named), config=config_path(config)).settings)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Build a pipeline from settings already read."""
        pipeline = cls.__new__(cls)
        pipeline._open(settings)
        return pipeline

    def _open(self, settings: Settings) -> None:
        # Values out of range are refused here, before a model is loaded for minutes.
        check_request_values(settings.orchestrator)
        self.settings = settings
        models = load_local(settings, max_sessions=LOCAL_SESSIONS)
        self._thread = LoopThread("specsplit-pipeline")
        # A request begins and closing begins under this lock, so no request begins after `close` has ended them all.
        self._gate = threading.Lock()
        self._is_closed = False
        self._scope = open_workers(settings, models)
        opening = self._thread.submit(self._scope.__aenter__())
        try:
            self._workers = opening.result()
        except BaseException:
            opening.cancel()
            self._thread.end()
            raise
        self._requests = RequestMaker(self._workers.tokenizer, is_here=settings.target.address is None)
        _opened.add(self)
        # `_close_all` closes in its place at exit.
        self._letting_go = weakref.finalize(self, _let_go, self._thread, self._scope)
        self._letting_go.atexit = False

    # A lone text matches both overloads, and the first one that matches counts.
    @overload
    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Result: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def generate(self, prompt: Prompts, **options: Unpack[RequestOptions]) -> list[Result]: ...
    def generate(self, prompt: Prompt | Prompts, **options: Unpack[RequestOptions]) -> Result | list[Result]:
        """Generate the whole answer to `prompt`: a text, token ids, or the messages of a conversation.

        Several prompts run at once, with equal options, and their answers are in the order of the prompts; a target
        elsewhere gets 128 of them at a time. If requests fail, the first one's error is raised after all have ended.
        """
        if are_several(prompt):
            return self._generate_all(prompt, [self._settings_for(each, options) for each in prompt])
        with contextlib.closing(self.stream(cast("Prompt", prompt), **options)) as chunks:
            return _last_result(list(chunks))

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generator[Chunk, None, None]:
        """Yield the answer as it is verified; the last chunk has the result. Closing the generator ends the request.

        Closing waits until the request has freed its slot; a generator that is dropped frees it a moment later.
        """
        return self._stream(prompt, self._settings_for(prompt, options), contextlib.nullcontext())

    @overload
    async def agenerate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Result: ...
    @overload
    async def agenerate(self, prompt: Prompts, **options: Unpack[RequestOptions]) -> list[Result]: ...
    async def agenerate(self, prompt: Prompt | Prompts, **options: Unpack[RequestOptions]) -> Result | list[Result]:
        """Generate as `generate` does, without blocking the caller's loop."""
        if are_several(prompt):
            turns = self._turns()
            streams = [self._astream(each, self._settings_for(each, options), turns) for each in prompt]
            return _results_of(await asyncio.gather(*map(_collect, streams), return_exceptions=True))
        return await _collect(self.astream(cast("Prompt", prompt), **options))

    def astream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is verified; the last chunk has the result. Closing the generator ends the request."""
        return self._astream(prompt, self._settings_for(prompt, options), contextlib.nullcontext())

    def close(self) -> None:
        """End requests under way and free models and threads; closing again, or in a forked process, does nothing."""
        if not self._thread.is_here:
            return
        with self._gate:
            if self._is_closed:
                return
            self._is_closed = True
        self._letting_go.detach()
        try:
            self._thread.submit(_end_all(self._thread, self._scope)).result()
        finally:
            self._thread.end()
        # And with them the models, whose next load frees what lies in cycles.
        del self._workers, self._requests, self._scope

    async def aclose(self) -> None:
        """Close without blocking the caller's loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _settings_for(self, prompt: Prompt, options: RequestOptions) -> OrchestratorSettings:
        """Return the settings of one request, checked here so that the call itself raises, not the first chunk."""
        self._refuse_if_closed()
        check_prompt(prompt)
        return request_settings(self.settings.orchestrator, options, prompt)

    def _turns(self) -> _Turns:
        """Return what each prompt of a list enters while it runs; models here have their own turns."""
        is_elsewhere = self.settings.target.address is not None
        return asyncio.Semaphore(_MOST_AT_ONCE) if is_elsewhere else contextlib.nullcontext()

    def _generate_all(self, prompts: Prompts, settings: Sequence[OrchestratorSettings]) -> list[Result]:
        turns = self._turns()
        with contextlib.ExitStack() as running:
            answers = [
                running.enter_context(contextlib.closing(self._stream(prompt, each, turns)))
                for prompt, each in zip(prompts, settings, strict=True)
            ]
            # All begin before the first one is waited for.
            for answer in answers:
                answer.begin()
            return _results_of([_result_or_error(answer) for answer in answers])

    def _stream(self, prompt: Prompt, settings: OrchestratorSettings, turns: _Turns) -> ChunkStream:
        return ChunkStream(partial(self._start, prompt, settings, turns))

    async def _astream(
        self, prompt: Prompt, settings: OrchestratorSettings, turns: _Turns
    ) -> AsyncGenerator[Chunk, None]:
        inbox: asyncio.Queue[Chunk | FinishedTask] = asyncio.Queue()
        callers_loop = asyncio.get_running_loop()

        def deliver(item: Chunk | FinishedTask) -> None:
            # A closed loop raises: whoever asked has gone, and nobody waits for the item.
            with contextlib.suppress(RuntimeError):
                callers_loop.call_soon_threadsafe(inbox.put_nowait, item)

        running = self._start(prompt, settings, turns, deliver)
        item: Chunk | FinishedTask | None = None
        try:
            while isinstance(item := await inbox.get(), Chunk):
                yield item
            raise_failure(item)
        finally:
            running.cancel()
            while not isinstance(item, asyncio.Task):
                item = await inbox.get()

    def _start(
        self, prompt: Prompt, settings: OrchestratorSettings, turns: _Turns, deliver: Deliver
    ) -> CancellableTask:
        refuse_elsewhere(self._thread)  # a fork may have copied the gate while another thread held it
        with self._gate:
            self._refuse_if_closed()
            return self._thread.begin(partial(self._run, prompt, settings, turns, deliver), deliver)

    def _refuse_if_closed(self) -> None:
        refuse_elsewhere(self._thread)
        if self._is_closed:
            raise InvalidRequest("This pipeline is closed; make a new one.")

    async def _run(self, prompt: Prompt, settings: OrchestratorSettings, turns: _Turns, deliver: Deliver) -> None:
        async with turns:
            request = await self._requests.make(prompt, settings)
            async with contextlib.aclosing(self._workers.stream(request, settings)) as chunks:
                async for chunk in chunks:
                    deliver(chunk)


async def _end_all(thread: LoopThread, scope: AbstractAsyncContextManager[Workers]) -> None:
    await thread.cancel_tasks()
    await scope.__aexit__(None, None, None)


def _let_go(thread: LoopThread, scope: AbstractAsyncContextManager[Workers]) -> None:
    """Close what a dropped pipeline held; the collector may call this on the very thread that is to end."""
    if thread.is_here:
        thread.end_soon(partial(_end_all, thread, scope))


_opened: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what is open as the interpreter ends: a thread that it stops within a forward may abort the process."""
    with contextlib.ExitStack() as closing:
        closing.callback(join_ending)
        for pipeline in list(_opened):
            closing.callback(pipeline.close)


async def _collect(chunks: AsyncGenerator[Chunk, None]) -> Result:
    return _last_result([chunk async for chunk in chunks])


def _result_or_error(chunks: Iterator[Chunk]) -> Result | BaseException:
    try:
        return _last_result(list(chunks))
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return error


def _results_of(answers: Sequence[Result | BaseException]) -> list[Result]:
    """Return the results; if there is an error among them, raise the first."""
    results: list[Result] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results


def _last_result(chunks: Sequence[Chunk]) -> Result:
    result = chunks[-1].result
    assert result is not None, "the last chunk has the result"
    return result
