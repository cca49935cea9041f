"""Any server of the OpenAI completions protocol, through the `openai` client: a prompt in, a stream out.

What it does beside continuing the prompt is its own business, so only what a client sees is measured. What it takes is
found out when it is connected to: `transformers serve`, for one, takes text only, refuses fields beyond the protocol,
and names no model that lies in a folder.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.clients import Load, Outcome
from benchmarks.load.settings import ENDPOINT, Endpoint
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidRequest, MissingExtra, Overloaded, WorkerFailed, WorkerUnreachable

Errors = tuple[type[Exception], ...]
Fields = Mapping[str, bool]
_TIMEOUT_S = 600.0
_PAST_EOS: Fields = {"ignore_eos": True}
_EXTRA: Fields = {**_PAST_EOS, "return_token_ids": True}
_REFUSED = (400, 422)
"""The HTTP statuses of a request that the server does not take."""
_HAS_NO_ROOM = (429, 503)
_RETRY_S = 1.0
"""When to come back to a server that has no room and does not say."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server is asked."""

    takes_token_ids: bool = True
    """Otherwise it gets the text, and tokenizes it as it likes."""
    goes_past_eos: bool = True
    """Otherwise it may stop before it has written all tokens, and tells no token ids."""


_DIALECTS = (Dialect(), Dialect(goes_past_eos=False), Dialect(takes_token_ids=False), Dialect(False, False))
"""From the one that makes the server comparable to the one that any server takes."""


def connect(
    name: str, url: str, model: str | None = None, key: str | None = None, extra: Fields = _EXTRA
) -> Completions:
    """Return `model`, or the first one that the server at `url` (such as http://127.0.0.1:8000/v1) names.

    Raises:
        MissingExtra: the `openai` package is not installed.
        WorkerUnreachable, WorkerFailed: the server does not answer, has no model, or refuses the shortest prompt.
    """
    try:
        openai: Any = importlib.import_module("openai")
    except ModuleNotFoundError as error:
        raise MissingExtra("The openai package is not installed: pip install openai.") from error
    options = {"base_url": url, "api_key": key or "none", "timeout": _TIMEOUT_S, "max_retries": 0}
    client = openai.OpenAI(**options)
    chosen = model or first_model(client, url)
    errors = (openai.OpenAIError, *_transport_errors())
    return Completions(name, client, chosen, errors, dialect_of(client, chosen, errors, extra))


def _transport_errors() -> Errors:
    """Return what an openai client before version 3 lets through while a stream is read."""
    try:
        httpx: Any = importlib.import_module("httpx")
    except ModuleNotFoundError:
        return ()
    return (httpx.HTTPError,)


def first_model(client: Any, url: str) -> str:
    """Return the id of the server's first model.

    Raises:
        WorkerUnreachable: it does not answer.
        WorkerFailed: it has none, or does not tell.
    """
    try:
        models = list(client.models.list())
    except Exception as error:  # the client raises its own tree, and its transport's where it cannot connect
        if getattr(error, "status_code", None) is not None:
            raise WorkerFailed(
                f"The server at {url} does not say which models it has ({error}); name one as openai:{url}#MODEL."
            ) from error
        raise WorkerUnreachable(f"The server at {url} cannot be reached ({error}).") from error
    if not models:
        raise WorkerFailed(f"The server at {url} names no model; name one as openai:{url}#MODEL.")
    return str(models[0].id)


def dialect_of(client: Any, model: str, errors: Errors, extra: Fields = _EXTRA) -> Dialect:
    """Return the first dialect in which the server continues a prompt by one token.

    Raises:
        WorkerFailed: it refuses all, or fails.
    """
    refusal: Exception | None = None
    task = Task("a first try", (1,), 1, text="a")
    for dialect in _DIALECTS:
        try:
            for _ in _open(client, model, task, dialect, extra):
                pass
        except errors as error:
            if getattr(error, "status_code", None) not in _REFUSED:
                raise WorkerFailed(f"The server of {model} failed on a first try: {error}") from error
            refusal = refusal or error
        else:
            return dialect
    raise WorkerFailed(f"The server of {model} refuses every request: {refusal}") from refusal


class Completions:
    """One model of one server; `errors` are what the client raises."""

    def __init__(self, name: str, client: Any, model: str, errors: Errors, dialect: Dialect = _DIALECTS[0]) -> None:
        self.name = name
        self.dialect = dialect
        self._client, self._model, self.errors = client, model, errors

    def generate(self, task: Task) -> Sample:
        """Stream one completion, past its end-of-sequence tokens where the server can.

        Raises:
            WorkerFailed: the server answers with an error, or with nothing, or breaks off.
            InvalidRequest: the server cannot be asked for this task.
        """
        if task.sampling.has_penalties:
            raise InvalidRequest("A completions server is compared without penalties only.")
        if task.text is None and not self.dialect.takes_token_ids:
            raise InvalidRequest(f"{self.name} takes no token ids, so it cannot be compared with --chat.", param="chat")
        answer = Answer(self.name, task)
        try:
            for chunk in self.ask(task):
                answer.add(chunk)
        except self.errors as error:
            raise WorkerFailed(f"{self.name} failed on {task.id}: {error}") from error
        return answer.sample()

    def ask(self, task: Task, client: Any = None, extra: Fields = _EXTRA) -> Any:
        """Return the stream of one completion, or of an asynchronous `client` something to wait for."""
        return _open(client or self._client, self._model, task, self.dialect, extra)


class Answer:
    """The chunks of a stream as they come."""

    def __init__(self, name: str, task: Task) -> None:
        self._name, self._task = name, task
        self._arrivals: list[tuple[float, int]] = []
        self._token_ids: list[int] = []
        self._num_tokens = 0
        self._start_s = time.perf_counter()

    def add(self, chunk: Any) -> None:
        """Note when the chunk came, and its tokens as far as it tells them."""
        now_s = time.perf_counter() - self._start_s
        if chunk.usage is not None:
            self._num_tokens = chunk.usage.completion_tokens
        told = _told_tokens(chunk)
        if told or (chunk.choices and chunk.choices[0].text):
            self._arrivals.append((now_s, max(1, len(told))))
            self._token_ids.extend(told)

    def sample(self) -> Sample:
        """Return the whole answer.

        Raises:
            WorkerFailed: it is empty.
        """
        wall_s, arrivals = time.perf_counter() - self._start_s, self._arrivals
        if not arrivals:
            raise WorkerFailed(f"{self._name} answered {self._task.id} with nothing.")
        num_tokens = self._num_tokens or sum(count for _, count in arrivals)
        are_known = len(self._token_ids) == num_tokens
        decode_s = arrivals[-1][0] - arrivals[0][0]
        return Sample(
            wall_s,
            tuple(self._token_ids) if are_known else None,
            decode_s if decode_s > 0 else None,
            arrivals=tuple(arrivals),
            num_tokens=num_tokens,
        )


class LoadedEndpoint:
    """One model of one server, with a stream for each request.

    Raises what `connect` raises.
    """

    name = ENDPOINT

    def __init__(self, endpoint: Endpoint) -> None:
        name = f"The server at {endpoint.url}"
        # Token ids are of no use here, and a server that cannot tell them may well go past the end of its text.
        self._server = connect(name, endpoint.url, endpoint.model, endpoint.key, _PAST_EOS)
        self._options = {"base_url": endpoint.url, "api_key": endpoint.key or "none"}

    def drive(self, load: Load, tasks: Sequence[Task]) -> list[Outcome]:
        """Put the load on the server until every request has ended."""
        return asyncio.run(self._drive(load, tasks))

    async def _drive(self, load: Load, tasks: Sequence[Task]) -> list[Outcome]:
        openai: Any = importlib.import_module("openai")
        async with openai.AsyncOpenAI(**self._options, timeout=_TIMEOUT_S, max_retries=0) as client:
            return await load.run(lambda task: self._send(client, task), tasks)

    async def _send(self, client: Any, task: Task) -> Sample:
        answer = Answer(self._server.name, task)
        try:
            async for chunk in await self._server.ask(task, client, _PAST_EOS):
                answer.add(chunk)
        except self._server.errors as error:
            if getattr(error, "status_code", None) in _HAS_NO_ROOM:
                raise Overloaded(f"{self._server.name} has no room ({error}).", _retry_after_s(error)) from error
            raise WorkerFailed(f"{self._server.name} failed on {task.id}: {error}") from error
        return answer.sample()


def _retry_after_s(error: Any) -> float:
    try:
        return float(error.response.headers["retry-after"])
    except (KeyError, ValueError):
        return _RETRY_S


def _open(client: Any, model: str, task: Task, dialect: Dialect, extra: Fields) -> Any:
    sampling = task.sampling
    return client.completions.create(
        model=model,
        prompt=list(task.prompt_ids) if dialect.takes_token_ids and task.prompt_ids else task.text,
        max_tokens=task.num_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=task.seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra if dialect.goes_past_eos else {},
    )


def _told_tokens(chunk: Any) -> list[int]:
    """Return the chunk's token ids, which some servers tell."""
    return list(getattr(chunk.choices[0], "token_ids", None) or ()) if chunk.choices else []
