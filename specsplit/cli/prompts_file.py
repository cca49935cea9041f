"""`specsplit orchestrate --prompts-file IN --output OUT`: answers many prompts, some at once, one JSON line each.

Each answer is written as soon as it is there, so whatever ends the command, the same command goes on from there.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from specsplit.assembly.models import LoadedDraft, Models
from specsplit.assembly.opening import open_workers
from specsplit.assembly.requests import make_request, request_settings
from specsplit.assembly.workers import Workers
from specsplit.cli import render
from specsplit.cli.answers_file import AnswersFile, LineId, id_of
from specsplit.cli.ctrl_c import CtrlC
from specsplit.cli.help import INTERRUPTED
from specsplit.core.defaults import CONCURRENCY
from specsplit.core.errors import InvalidRequest, SpecSplitError
from specsplit.core.paths import expanded
from specsplit.core.settings import Settings

OPTIONS = ("prompts_file", "output", "concurrency")
_EXCLUDED = ("prompt", "prompt_file", "compare", "explain", "json")
_FAILED = 1


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of the file: a prompt with options of its own, or the reason why it is none."""

    number: int
    id: LineId | None = None
    """None if the line is broken so that it has none; its number could be the id of another line."""
    prompt: str | list[int] = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None

    @property
    def names(self) -> dict[str, LineId | None]:
        """Return the fields with which its answer begins."""
        return {"id": self.id} if self.id is not None else {"id": None, "line": self.number}


def read_batch(given: Mapping[str, Any], settings: Settings) -> Batch | None:
    """Return the prompts to be answered; None without --prompts-file.

    Raises:
        InvalidRequest: options contradict each other, or a file cannot be read or written.
    """
    source, output = given.get("prompts_file"), given.get("output")
    if source is None:
        for name in ("output", "concurrency"):
            if name in given:
                raise InvalidRequest(f"--{name} is for many prompts; name their file with --prompts-file.", param=name)
        return None
    for name in _EXCLUDED:
        if name in given:
            option = name.replace("_", "-")
            raise InvalidRequest(f"--{option} and --prompts-file exclude each other; leave one out.", param=name)
    concurrency = given.get("concurrency", CONCURRENCY)
    if concurrency < 1:
        raise InvalidRequest(f"--concurrency must be at least 1, not {concurrency}.", param="concurrency")
    if output is None:
        raise InvalidRequest("--prompts-file needs a file for the answers; name it with --output.", param="output")
    if output == "-":
        # The same command continues where the last one ended, by what the file has.
        raise InvalidRequest("--output must name a file that can be read again, not -.", param="output")
    if source != "-" and expanded(source).resolve() == expanded(output).resolve():
        raise InvalidRequest("--prompts-file and --output name the same file; choose another output.", param="output")
    lines = list(_parsed(_read(source)))
    answers = AnswersFile.open(Path(output), retried={line.id for line in lines if line.id is not None})
    pending = [line for line in lines if line.error is not None or line.id not in answers.done_ids]
    return Batch(settings, pending, answers, min(concurrency, max(1, len(pending))), len(lines) - len(pending))


def _read(source: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if source == "-" else expanded(source).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"The prompts file {source} cannot be read ({error.strerror}); check --prompts-file.", param="prompts_file"
        ) from error


def _parsed(data: bytes) -> Iterator[PromptLine]:
    """Yield the lines that are not blank; the id of a line without one is its number, counted from 1."""
    number_of: dict[LineId, int] = {}
    for number, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        line = _parse(text, number)
        first = number if line.id is None else number_of.setdefault(line.id, number)
        if first != number:
            line = PromptLine(number, line.id, error=f"The id {line.id!r} is that of line {first} already.")
        yield line


def _parse(text: bytes, number: int) -> PromptLine:
    try:
        entry: object = json.loads(text)
    except (ValueError, RecursionError):
        return PromptLine(number, error="The line is no JSON.")
    if not isinstance(entry, dict):
        return PromptLine(number, error="The line is no JSON object.")
    options = cast("dict[str, Any]", entry)
    found = id_of(options, default=number)
    if found is None:
        return PromptLine(number, error="The id must be a text or a whole number.")
    options.pop("id", None)
    prompt, token_ids = options.pop("prompt", None), options.pop("token_ids", None)
    if (prompt is None) == (token_ids is None):
        return PromptLine(number, found, error="The line must have either a prompt or token_ids.")
    if isinstance(prompt, str):
        return PromptLine(number, found, prompt, options)
    if prompt is not None:
        return PromptLine(number, found, error="The prompt must be a text.")
    if not _is_token_ids(token_ids):
        return PromptLine(number, found, error="token_ids must be a list of whole numbers.")
    return PromptLine(number, found, token_ids, options)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in cast("list[object]", value))


class Batch:
    """The prompts that have no answer yet, and the file that their answers go to."""

    def __init__(
        self, settings: Settings, pending: list[PromptLine], answers: AnswersFile, concurrency: int, num_skipped: int
    ) -> None:
        self.concurrency = concurrency
        self._settings, self._pending, self._answers = settings, pending, answers
        self._num_skipped = num_skipped
        self._counts = render.BatchCounts(len(pending))

    @property
    def is_done(self) -> bool:
        """Whether every prompt has its answer."""
        return not self._pending

    async def run(self, models: Models | LoadedDraft | None) -> int:
        """Answer the prompts and return the exit code: 1 if any failed, 130 after Ctrl-C."""
        async with AsyncExitStack() as stack:
            stack.callback(self._answers.close)
            workers = await stack.enter_async_context(open_workers(self._settings, models, render.note))
            self._counts = render.BatchCounts(len(self._pending))
            ctrl_c = CtrlC()
            with render.batch_bar(self._counts) as show:
                await ctrl_c.run(self._answer_all(workers, show))
        return self.conclude(was_interrupted=ctrl_c.was_pressed)

    def conclude(self, *, was_interrupted: bool) -> int:
        """Tell how it ended, and return the exit code."""
        counts, path = self._counts, self._answers.path
        skipped = f" | {self._num_skipped} had their answers before" if self._num_skipped else ""
        render.note(f"{counts}{skipped}")
        if counts.num_failed:
            render.note(
                f"{counts.num_failed} failed: their lines in {path} say why; the same command tries them again."
            )
        if was_interrupted:
            render.note(f"Interrupted: the answers so far are in {path}; the same command goes on.")
            return INTERRUPTED
        return _FAILED if counts.num_failed else 0

    async def _answer_all(self, workers: Workers, show: render.Update) -> None:
        remaining = iter(self._pending)
        tasks = [asyncio.create_task(self._answer_some(remaining, workers, show)) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_some(self, remaining: Iterable[PromptLine], workers: Workers, show: render.Update) -> None:
        # All tasks take from the same iterator.
        for line in remaining:
            answer = await self._answer(line, workers)
            self._answers.write({**line.names, **answer})
            self._counts.num_done += 1
            self._counts.num_failed += "error" in answer
            self._counts.num_tokens += len(answer.get("token_ids", ()))
            show()

    async def _answer(self, line: PromptLine, workers: Workers) -> dict[str, Any]:
        if line.error is not None:
            return {"error": line.error}
        try:
            chosen = request_settings(self._settings.orchestrator, line.options, line.prompt)
            request = make_request(workers.tokenizer, line.prompt, chosen)
            result = None
            async with aclosing(workers.stream(request, chosen)) as chunks:
                async for chunk in chunks:
                    result = chunk.result
        except SpecSplitError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - a defect that one prompt meets must not cost the others
            return {"error": f"Unexpected {type(error).__name__}: {error}"}
        assert result is not None, "the last chunk has the result"
        return result.to_dict()
