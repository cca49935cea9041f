"""`specsplit orchestrate`: runs prompts through draft and target and shows the text of one as it is verified.

The first and last file on a token's route: it reads the prompt and writes the text.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from specsplit.assembly.generation_settings import generation_settings, no_draft_note
from specsplit.assembly.models import LoadedDraft, Models, check_models, load_local
from specsplit.assembly.opening import open_workers
from specsplit.assembly.requests import check_request_values, make_request
from specsplit.assembly.workers import Workers
from specsplit.cli import prompts_file, render
from specsplit.cli.ctrl_c import CtrlC
from specsplit.cli.help import INTERRUPTED
from specsplit.cli.logs import set_up_logging
from specsplit.cli.print_config import print_config
from specsplit.cli.prompt import read_prompt, with_prompt
from specsplit.cli.spared import spare
from specsplit.cli.tracing import tracing
from specsplit.core.errors import InvalidSettings, SpecSplitError
from specsplit.core.progress import listening
from specsplit.core.settings import Settings
from specsplit.engine import event_loop
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Chunk, Request, Result, RoundFacts

_NOT_SETTINGS = (
    *("prompt", "prompt_file", "compare", "config", "json", "trace_file", "print_config", "explain"),
    *prompts_file.OPTIONS,
)
_BROKEN_PROMISE = 1
_HOT = 2.0
"""Temperature above which text is noise; OpenAI's API takes none, and whoever asks for more often means threads."""


@dataclass(slots=True)
class Transcript:
    """The part of a generation that has arrived; `result` stays None when it is interrupted."""

    started_s: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    num_rounds: int = 0
    """The prompt's included."""
    rounds: list[RoundFacts] = field(default_factory=list[RoundFacts])
    result: Result | None = None

    def add(self, chunk: Chunk) -> None:
        """Add a chunk."""
        self.num_tokens += len(chunk.token_ids)
        self.num_rounds += 1
        if chunk.facts is not None:
            self.rounds.append(chunk.facts)
        self.result = chunk.result

    def summary(self, request: Request) -> str:
        """Return the line that ends the generation, finished or not."""
        if self.result is not None:
            return render.summary(self.result)
        elapsed_s = time.perf_counter() - self.started_s
        return render.interrupted_summary(self.num_tokens, self.num_rounds, elapsed_s, request.seed)


def run(given: Mapping[str, Any], *, owns_process: bool = False) -> int:
    """Run the command with the options `given` on the command line; return its exit code."""
    given = with_prompt(given)
    chosen = {name: value for name, value in given.items() if name not in _NOT_SETTINGS}
    effective = generation_settings(chosen, config=given.get("config"), as_options=True)
    if given.get("print_config"):
        print_config(effective, as_json=bool(given.get("json")))
        return 0
    set_up_logging()
    settings = effective.settings
    # Everything that can be refused is refused before a model is loaded, which may take minutes.
    check_request_values(settings.orchestrator)
    batch = prompts_file.read_batch(given, settings)
    if given.get("logprobs") is not None and not given.get("json") and batch is None:
        raise InvalidSettings("--logprobs adds to the output of --json only; give both.")
    if batch is not None and batch.is_done:
        return batch.conclude(was_interrupted=False)
    if "chat_template_kwargs" in given and not settings.orchestrator.chat and batch is None:
        raise InvalidSettings(
            "--chat-template-kwargs is for the model's chat template, which --chat applies; give both."
        )
    prompt = read_prompt(given.get("prompt"), given.get("prompt_file")) if batch is None else ""
    option = "--draft" if settings.is_remote else "--draft-model"
    if given.get("compare") and not settings.speculates:
        raise InvalidSettings(f"--compare has nothing to compare in plain decoding; name a draft with {option}.")
    if settings.orchestrator.temperature > _HOT:
        hot = f"A temperature (-t) of {settings.orchestrator.temperature:g} makes the text noise"
        render.note(f"{hot}; CPU threads are set by --threads.")
    check_models(settings)
    if (lack := no_draft_note(settings)) is not None:
        render.note(lack)
    if not settings.has_local_model and owns_process:
        spare("torch")
    with tracing(given, "orchestrator"):
        job = _Job(
            prompt,
            settings,
            is_json=bool(given.get("json")),
            compares=bool(given.get("compare")),
            explains=bool(given.get("explain")),
        )
        max_sessions = 1 if batch is None else batch.concurrency
        with _fast_start(), render.loading_bar() as progress:
            models = load_local(settings, progress, max_sessions=max_sessions)
        for reason in models.degraded if models is not None else ():
            render.note(reason)
        return event_loop.run(_generate(job, models) if batch is None else batch.run(models))


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt with the settings and options of the command; `load_s` counts from the moment this is made."""

    prompt: str
    settings: Settings
    is_json: bool
    compares: bool
    explains: bool
    started_s: float = field(default_factory=time.perf_counter)


@contextmanager
def _fast_start() -> Generator[None]:
    """Switch the garbage collector off for the block: imports make many objects that live as long as the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _TextOutput:
    """Writes the text to stdout as it comes, and everything else to stderr."""

    def __init__(self) -> None:
        self._text = render.TextStream(sys.stdout)
        self._said: set[str] = set()

    def begin(self, *, speculates: bool) -> None:
        if speculates and self._text.legend is not None:
            render.note(self._text.legend)

    def chunk(self, chunk: Chunk) -> None:
        self._text.write(chunk.pieces)
        if chunk.degraded is not None and chunk.degraded not in self._said:
            self._said.add(chunk.degraded)
            self._text.interrupt()
            render.dim_note(render.degraded(chunk.degraded))

    def fail(self) -> None:
        self._text.end()

    def explain(self, transcript: Transcript) -> None:
        self._text.end()
        for line in render.explanation(transcript.rounds):
            render.dim_note(line)

    def end(self, transcript: Transcript, request: Request, plain: Result | None) -> None:
        self._text.end()
        if transcript.result is not None and transcript.result.exactness_reason:
            render.note(transcript.result.exactness_reason)
        _note_full_context(transcript, request)
        render.note(transcript.summary(request))
        if transcript.result is not None and plain is not None:
            for line in render.comparison(transcript.result, plain):
                render.note(line)


class _JsonOutput:
    """Writes one JSON object to stdout; when interrupted it writes nothing there, but the summary to stderr."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s

    def begin(self, *, speculates: bool) -> None:
        pass

    def chunk(self, chunk: Chunk) -> None:
        pass

    def fail(self) -> None:
        pass

    def explain(self, transcript: Transcript) -> None:
        for line in render.explanation(transcript.rounds):
            render.note(line)

    def end(self, transcript: Transcript, request: Request, plain: Result | None) -> None:
        result = transcript.result
        if result is None:
            render.note(transcript.summary(request))
            return
        _note_full_context(transcript, request)
        answer: dict[str, Any] = result.to_dict()
        answer["timings"] = {"load_s": self._load_s, **answer["timings"]}
        if plain is not None:
            answer["compare"] = {
                "plain": plain.to_dict(),
                "speed_ratio": render.speed_ratio(result, plain),
                "identical": result.token_ids == plain.token_ids,
                "promised": render.promises_bits(result, plain),
            }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _note_full_context(transcript: Transcript, request: Request) -> None:
    if transcript.result is not None:
        reason = render.full_context(transcript.result, request.max_new_tokens)
        if reason is not None:
            render.note(reason)


async def _generate(job: _Job, models: Models | LoadedDraft | None) -> int:
    async with AsyncExitStack() as stack:
        chosen, began_s = job.settings.orchestrator, time.monotonic()
        with _fast_start():
            workers = await stack.enter_async_context(open_workers(job.settings, models, render.note))
        load_s = time.perf_counter() - job.started_s
        # The user waits for the connection as well, so its time is taken off the request's.
        if chosen.timeout is not None and job.settings.is_remote:
            left_s = max(1e-3, chosen.timeout - (time.monotonic() - began_s))
            chosen = chosen.model_copy(update={"timeout": left_s})
        request = make_request(workers.tokenizer, job.prompt, chosen)
        if getattr(workers.tokenizer, "is_for_chat", False) and not chosen.chat:
            render.note("Hint: this model has a chat template; --chat applies it.")
        show = _JsonOutput(load_s) if job.is_json else _TextOutput()
        return await _show(workers, request, job, show)


async def _show(workers: Workers, request: Request, job: _Job, show: _TextOutput | _JsonOutput) -> int:
    ctrl_c = CtrlC()
    transcript, plain = Transcript(), Transcript()
    chosen = job.settings.orchestrator
    show.begin(speculates=workers.drafter is not None)
    try:
        await ctrl_c.run(_follow(workers.orchestrator(chosen), request, transcript, show.chunk))
    except SpecSplitError:
        # The message of the error shall begin a line of its own.
        show.fail()
        raise
    if job.compares and not ctrl_c.was_pressed:
        # The same request, so the same seed: only the speed may differ from the text above.
        reference = workers.orchestrator(chosen.model_copy(update={"mode": "plain"}))
        await ctrl_c.run(_follow(reference, request, plain, lambda chunk: None))
    if job.explains:
        show.explain(transcript)
    show.end(transcript, request, plain.result)
    if ctrl_c.was_pressed:
        return INTERRUPTED
    if transcript.result is not None and plain.result is not None:
        broken = render.broken_promise(transcript.result, plain.result)
        if broken is not None:
            render.note(broken)
            return _BROKEN_PROMISE
    return 0


async def _follow(
    orchestrator: Orchestrator, request: Request, transcript: Transcript, show: Callable[[Chunk], None]
) -> None:
    line = render.ProgressLine()
    with listening(line.show):
        async with aclosing(orchestrator.stream(request)) as chunks:
            try:
                async for chunk in chunks:
                    line.end()
                    transcript.add(chunk)
                    show(chunk)
            finally:
                line.end()
