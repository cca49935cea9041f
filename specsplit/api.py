"""The Python API: a Pipeline that generates text, from synchronous or asynchronous code.

Everything runs on one event loop in the pipeline's own thread, so it works in scripts, servers and notebooks alike. One
request runs at a time; others wait their turn.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

from specsplit.assembly.models import load_models
from specsplit.assembly.opening import open_workers
from specsplit.assembly.requests import check_prompt, make_request
from specsplit.core.defaults import DeviceName, Dtype, Mode
from specsplit.core.errors import InvalidRequest
from specsplit.core.event_loop import new_event_loop
from specsplit.core.settings import OrchestratorSettings, Settings, load_settings, override
from specsplit.orchestrator.request import Chunk, Result

T = TypeVar("T")
Prompt = str | Sequence[int]
_Finished = asyncio.Task[None]
_Deliver = Callable[[Chunk | _Finished], None]


class RequestOptions(TypedDict, total=False):
    """The options of one request; the pipeline's settings fill in those that are left out."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    chat: bool
    mode: Mode
    nodes: int
    depth: int
    branching: int
    lookup: bool
    timeout: float


class PipelineOptions(RequestOptions, total=False):
    """The options of a pipeline beside its models or addresses."""

    dtype: Dtype
    device: DeviceName
    threads: int | Literal["auto"]
    context: int
    retry: float
    draft_patience: float


class Pipeline:
    """A target and perhaps a draft, ready to generate; close it, or use it in a with block.

    Without arguments it runs the embedded pair. `target_model` and `draft_model` are loaded here; `target` and `draft`
    are addresses, HOST:PORT, of workers that serve elsewhere. A target without a draft speculates by lookup alone.
    Arguments override environment variables, these the settings file, and that the defaults.

    Raises:
        SpecSplitError: a setting is wrong, a model cannot be loaded or a target not reached; the message has a remedy.
    """

    def __init__(
        self,
        target_model: str | None = None,
        draft_model: str | None = None,
        *,
        target: str | None = None,
        draft: str | None = None,
        config: str | Path | None = None,
        **options: Unpack[PipelineOptions],
    ) -> None:
        named = {"target_model": target_model, "draft_model": draft_model, "target": target, "draft": draft, **options}
        given = {name: value for name, value in named.items() if value is not None}
        self._open(load_settings(given, config=config).settings)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Build a pipeline from settings already read."""
        pipeline = cls.__new__(cls)
        pipeline._open(settings)
        return pipeline

    def _open(self, settings: Settings) -> None:
        # Sampling parameters out of range are refused here, before a model is loaded for minutes.
        settings.orchestrator.sampling()
        self.settings = settings
        models = None if settings.is_remote else load_models(settings)
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specsplit-pipeline", daemon=True)
        self._thread.start()
        self._one_request = asyncio.Lock()
        self._tasks: set[_Finished] = set()
        # A request begins and closing begins under this lock, so no request begins after `close` has ended them all.
        self._gate = threading.Lock()
        self._is_closed = False
        self._scope = open_workers(settings, models)
        opening = self._submit(self._scope.__aenter__())
        try:
            self._workers = opening.result()
        except BaseException:
            opening.cancel()
            self._end_loop()
            raise

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Result:
        """Generate the whole answer to `prompt`, a text or token ids."""
        return _last_result(list(self.stream(prompt, **options)))

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generator[Chunk, None, None]:
        """Yield the answer as it is verified; the last chunk has the result. Closing the generator ends the request."""
        return self._stream(prompt, self._settings_for(prompt, options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Result:
        """Generate the whole answer to `prompt`, a text or token ids."""
        return _last_result([chunk async for chunk in self.astream(prompt, **options)])

    def astream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is verified; the last chunk has the result. Closing the generator ends the request."""
        return self._astream(prompt, self._settings_for(prompt, options))

    def close(self) -> None:
        """End requests under way and free models and threads; closing again does nothing."""
        with self._gate:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._submit(self._end_all()).result()
        finally:
            self._end_loop()

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
        given: dict[str, Any] = dict(options)
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        settings = override(self.settings.orchestrator, **given)
        settings.sampling()
        return settings

    def _stream(self, prompt: Prompt, settings: OrchestratorSettings) -> Generator[Chunk, None, None]:
        inbox: queue.SimpleQueue[Chunk | _Finished] = queue.SimpleQueue()
        running = self._start(prompt, settings, inbox.put)
        item: Chunk | _Finished | None = None
        try:
            while isinstance(item := inbox.get(), Chunk):
                yield item
            _raise_failure(item)
        finally:
            running.cancel()
            # The request has freed its slots only when its task has ended, so the next one may count on them.
            while not isinstance(item, asyncio.Task):
                item = inbox.get()

    async def _astream(self, prompt: Prompt, settings: OrchestratorSettings) -> AsyncGenerator[Chunk, None]:
        inbox: asyncio.Queue[Chunk | _Finished] = asyncio.Queue()
        callers_loop = asyncio.get_running_loop()

        def deliver(item: Chunk | _Finished) -> None:
            # A closed loop raises: whoever asked has gone, and nobody waits for the item.
            with contextlib.suppress(RuntimeError):
                callers_loop.call_soon_threadsafe(inbox.put_nowait, item)

        running = self._start(prompt, settings, deliver)
        item: Chunk | _Finished | None = None
        try:
            while isinstance(item := await inbox.get(), Chunk):
                yield item
            _raise_failure(item)
        finally:
            running.cancel()
            while not isinstance(item, asyncio.Task):
                item = await inbox.get()

    def _start(self, prompt: Prompt, settings: OrchestratorSettings, deliver: _Deliver) -> _RunningRequest:
        with self._gate:
            self._refuse_if_closed()
            return _RunningRequest(self._loop, self._tasks, lambda: self._run(prompt, settings, deliver), deliver)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise InvalidRequest("This pipeline is closed; make a new one.")

    async def _run(self, prompt: Prompt, settings: OrchestratorSettings, deliver: _Deliver) -> None:
        request = make_request(self._workers.tokenizer, prompt, settings)
        orchestrator = self._workers.orchestrator(settings)
        async with self._one_request, contextlib.aclosing(orchestrator.stream(request)) as chunks:
            async for chunk in chunks:
                deliver(chunk)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._scope.__aexit__(None, None, None)

    def _end_loop(self) -> None:
        """End the thread after every task on its loop, so that cancelled ones still free what they hold."""
        self._submit(self._wind_up()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _wind_up() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        loop = asyncio.get_running_loop()
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()


class _RunningRequest:
    """A request on the pipeline's loop; `deliver` gets its chunks and then, always and last, its finished task."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tasks: set[_Finished],
        work: Callable[[], Coroutine[Any, Any, None]],
        deliver: _Deliver,
    ) -> None:
        self._loop, self._tasks, self._work, self._deliver = loop, tasks, work, deliver
        self._task: _Finished | None = None
        # The loop takes calls in order: `_cancel` runs after `_begin`, so it finds the task even before its first step.
        loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work())
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)
        self._task.add_done_callback(self._deliver)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def cancel(self) -> None:
        """Cancel the request if it has not ended."""
        # A closed loop raises, and closing has ended every request.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)


def _raise_failure(task: _Finished) -> None:
    """Raise the error that ended a request early, if there is one."""
    if task.cancelled():
        raise InvalidRequest("The pipeline was closed before this request came to its end.")
    task.result()


def _last_result(chunks: Sequence[Chunk]) -> Result:
    result = chunks[-1].result
    assert result is not None, "the last chunk has the result"
    return result
