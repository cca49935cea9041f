"""Any server of the OpenAI completions protocol, through the `openai` client: token ids in, a stream out.

What it does beside continuing the prompt is its own business, so only what a client sees is measured.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidRequest, MissingExtra, WorkerFailed, WorkerUnreachable

_TIMEOUT_S = 600.0


def connect(name: str, url: str) -> Completions:
    """Return the first model that the server at `url` (such as http://127.0.0.1:8000/v1) names.

    Raises:
        MissingExtra: the `openai` package is not installed.
        WorkerUnreachable, WorkerFailed: the server does not answer, or has no model.
    """
    try:
        openai: Any = importlib.import_module("openai")
    except ModuleNotFoundError as error:
        raise MissingExtra("The openai package is not installed: pip install openai.") from error
    client = openai.OpenAI(base_url=url, api_key="none", timeout=_TIMEOUT_S, max_retries=0)
    return Completions(name, client, first_model(client, url), openai.OpenAIError)


def first_model(client: Any, url: str) -> str:
    """Return the id of the server's first model.

    Raises:
        WorkerUnreachable: it does not answer.
        WorkerFailed: it has none.
    """
    try:
        models = list(client.models.list())
    except Exception as error:  # the client raises its own tree, and its transport's where it cannot connect
        raise WorkerUnreachable(f"The server at {url} cannot be reached ({error}).") from error
    if not models:
        raise WorkerFailed(f"The server at {url} names no model.")
    return str(models[0].id)


class Completions:
    """One model of one server; `errors` are what the client raises."""

    def __init__(self, name: str, client: Any, model: str, errors: type[Exception]) -> None:
        self.name = name
        self._client, self._model, self._errors = client, model, errors

    def generate(self, task: Task) -> Sample:
        """Stream one completion, past its end-of-sequence tokens where the server can.

        Raises:
            WorkerFailed: the server answers with an error, or with nothing.
        """
        try:
            return self._streamed(task)
        except self._errors as error:
            raise WorkerFailed(f"{self.name} failed on {task.id}: {error}") from error

    def _streamed(self, task: Task) -> Sample:
        if task.sampling.has_penalties:
            raise InvalidRequest("A completions server is compared without penalties only.")
        arrivals: list[tuple[float, int]] = []
        token_ids: list[int] = []
        num_tokens = 0
        start_s = time.perf_counter()
        for chunk in self._open(task):
            now_s = time.perf_counter() - start_s
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            told = _told_tokens(chunk)
            if told or (chunk.choices and chunk.choices[0].text):
                arrivals.append((now_s, max(1, len(told))))
                token_ids.extend(told)
        wall_s = time.perf_counter() - start_s
        if not arrivals:
            raise WorkerFailed(f"{self.name} answered {task.id} with nothing.")
        num_tokens = num_tokens or sum(count for _, count in arrivals)
        are_known = len(token_ids) == num_tokens
        decode_s = arrivals[-1][0] - arrivals[0][0]
        return Sample(
            wall_s,
            tuple(token_ids) if are_known else None,
            decode_s if decode_s > 0 else None,
            arrivals=tuple(arrivals),
            num_tokens=num_tokens,
        )

    def _open(self, task: Task) -> Any:
        sampling = task.sampling
        return self._client.completions.create(
            model=self._model,
            prompt=list(task.prompt_ids),
            max_tokens=task.num_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=task.seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )


def _told_tokens(chunk: Any) -> list[int]:
    """Return the chunk's token ids, which some servers tell."""
    return list(getattr(chunk.choices[0], "token_ids", None) or ()) if chunk.choices else []
