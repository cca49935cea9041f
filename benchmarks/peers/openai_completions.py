"""Any server of the OpenAI completions protocol, through the `openai` client: a prompt in, a stream out.

What it does beside continuing the prompt is its own business, so only what a client sees is measured. What it takes is
found out when it is connected to: `transformers serve`, for one, takes text only, refuses fields beyond the protocol,
and names no model that lies in a folder.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.clients import Load, Outcome
from benchmarks.load.settings import ENDPOINT, Endpoint
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidRequest, MissingExtra, Overloaded, WorkerFailed, WorkerUnreachable
from specsplit.engine import event_loop

Errors = tuple[type[Exception], ...]
Fields = Mapping[str, bool]
_TIMEOUT_S = 600.0
_PAST_EOS: Fields = {"ignore_eos": True}
_EXTRA: Fields = {**_PAST_EOS, "return_token_ids": True}
_REFUSED = (400, 422)
"""The HTTP statuses of a request that the server does not take."""
_OK, _HAS_NO_ROOM = 200, (429, 503)
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
    client = openai.OpenAI(base_url=url, api_key=key or "none", timeout=_TIMEOUT_S, max_retries=0)
    chosen, errors = model or first_model(client, url), (openai.OpenAIError,)
    return Completions(name, client, chosen, errors, dialect_of(client, chosen, errors, extra))


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
            list(_open(client, model, task, dialect, extra))
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
        self.name, self.dialect, self.errors = name, dialect, errors
        self._client, self._model = client, model

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
            for chunk in _open(self._client, self._model, task, self.dialect):
                has_text = any(choice.text for choice in chunk.choices)
                answer.add(_told_tokens(chunk), chunk.usage and vars(chunk.usage), has_text=has_text)
        except self.errors as error:
            raise WorkerFailed(f"{self.name} failed on {task.id}: {error}") from error
        return answer.sample()

    def body(self, task: Task) -> dict[str, Any]:
        """Return the body of a request that asks for no token ids."""
        return _fields(self._model, task, self.dialect) | (_PAST_EOS if self.dialect.goes_past_eos else {})


class Answer:
    """The chunks of a stream as they come."""

    def __init__(self, name: str, task: Task) -> None:
        self._name, self._task = name, task
        self._arrivals: list[tuple[float, int]] = []
        self._token_ids: list[int] = []
        self._num_tokens = 0
        self._start_s = time.perf_counter()

    def add(self, told: Sequence[int], usage: Mapping[str, int] | None, *, has_text: bool) -> None:
        """Note when a chunk came, and its tokens as far as it tells them."""
        if told or has_text:
            self._arrivals.append((time.perf_counter() - self._start_s, max(1, len(told))))
            self._token_ids.extend(told)
        self._num_tokens = (usage or {}).get("completion_tokens", self._num_tokens)

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
            arrivals=tuple(_spread(arrivals, num_tokens)),
            num_tokens=num_tokens,
        )


def _spread(arrivals: Sequence[tuple[float, int]], num_tokens: int) -> list[tuple[float, int]]:
    """Spread the tokens that no chunk told evenly over the chunks; the first one has its own alone, the prompt's."""
    rest, more = max(1, len(arrivals) - 1), max(0, num_tokens - sum(count for _, count in arrivals))
    shares = [0] * (len(arrivals) - rest) + [more * (i + 1) // rest - more * i // rest for i in range(rest)]
    return [(at_s, count + share) for (at_s, count), share in zip(arrivals, shares, strict=True)]


class LoadedEndpoint:
    """One model of one server, with a stream for each request; raises what `connect` raises."""

    name = ENDPOINT
    # Through aiohttp: the openai client takes six times as long for a chunk, more than the server beside it.

    def __init__(self, endpoint: Endpoint) -> None:
        # Token ids are of no use here, and a server that cannot tell them may well go past the end of its text.
        self._server = connect(f"The server at {endpoint.url}", endpoint.url, endpoint.model, endpoint.key, _PAST_EOS)
        self._endpoint, self.dialect = endpoint, self._server.dialect

    def drive(self, load: Load, tasks: Sequence[Task]) -> list[Outcome]:
        """Put the load on the server until every request has ended."""
        return event_loop.run(self._drive(load, tasks))

    async def _drive(self, load: Load, tasks: Sequence[Task]) -> list[Outcome]:
        aiohttp: Any = importlib.import_module("aiohttp")
        url, key = self._endpoint.url.rstrip("/") + "/", self._endpoint.key or "none"
        limits = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(sock_read=_TIMEOUT_S)}
        async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}, **limits) as client:
            return await load.run(lambda task: self._send(client, task, aiohttp.ClientError), tasks)

    async def _send(self, client: Any, task: Task, error_of_client: type[Exception]) -> Sample:
        name, answer = self._server.name, Answer(self._server.name, task)
        try:
            async with client.post("completions", json=self._server.body(task)) as response:
                if response.status in _HAS_NO_ROOM:
                    raise Overloaded(f"{name} has no room ({await response.text()}).", _retry_after_s(response.headers))
                if response.status != _OK:
                    raise ValueError(await response.text())
                async for line in response.content:
                    if line.startswith((b"data: {", b"data:{")):
                        chunk = json.loads(line[5:])
                        if "error" in chunk:
                            raise ValueError(chunk["error"])
                        choices = chunk.get("choices") or ()  # a chunk may only keep the connection alive
                        answer.add((), chunk.get("usage"), has_text=any(each["text"] for each in choices))
        except (error_of_client, TimeoutError, ValueError) as error:
            raise WorkerFailed(f"{name} failed on {task.id}: {error}") from error
        return answer.sample()


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return float(headers["retry-after"])
    except (KeyError, ValueError):
        return _RETRY_S


def _open(client: Any, model: str, task: Task, dialect: Dialect, extra: Fields = _EXTRA) -> Any:
    return client.completions.create(**_fields(model, task, dialect), extra_body=extra if dialect.goes_past_eos else {})


def _fields(model: str, task: Task, dialect: Dialect) -> dict[str, Any]:
    """Return the fields of the protocol."""
    return {
        "model": model,
        "prompt": list(task.prompt_ids) if dialect.takes_token_ids and task.prompt_ids else task.text,
        "max_tokens": task.num_tokens,
        "temperature": task.sampling.temperature,
        "top_p": task.sampling.top_p,
        "seed": task.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _told_tokens(chunk: Any) -> list[int]:
    """Return the chunk's token ids, which some servers tell."""
    return list(getattr(chunk.choices[0], "token_ids", None) or ()) if chunk.choices else []
