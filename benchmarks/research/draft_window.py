"""Measures what a draft gains, or loses, by reading only the end of a long prompt.

The embedded pair in one process with drafts of several contexts, in turns, behind prompts of several lengths: texts
that people wrote, cut elsewhere each time. A draft reads a text that its context holds; of a longer one it reads as
much of the end as half of its context.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import provenance
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.sections import of_draft_window
from benchmarks.workloads import CODE, HELD_OUT, load
from specsplit.api import Pipeline, PipelineOptions
from specsplit.core.defaults import Mode
from specsplit.core.errors import InvalidRequest
from specsplit.model.extra import require_worker_extra

_SEED = 7
_STRIDE = 101
"""Tokens by which a prompt begins later than the one before."""
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """What is generated, and by drafts of which contexts."""

    contexts: tuple[int, ...]
    lengths: tuple[int, ...]
    mode: Mode
    new_tokens: int
    rounds: int
    threads: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer behind a long prompt; `draft_context` 0 is plain decoding."""

    draft_context: int
    prompt_tokens: int
    tokens_per_round: float
    ttft_s: float
    tokens_per_s: float
    """Behind the first token."""


def measure(settings: WindowSettings, tick: Tick) -> list[Answer]:
    """Generate behind prompts of each length with drafts of each context, after one round that is not counted.

    Raises:
        InvalidRequest: a prompt is longer than the texts.
        AssertionError: an answer differs from plain decoding's.
    """
    found: list[Answer] = []
    longest = max(settings.lengths) + settings.new_tokens
    with ExitStack() as scope:

        def opened(mode: Mode, draft_context: int) -> Pipeline:
            options: PipelineOptions = {"mode": mode, "draft_context": draft_context, "context": longest}
            return scope.enter_context(Pipeline(**options, threads=settings.threads, sessions=1, lookup=False))

        pipelines = {context: opened(settings.mode, min(context, longest)) for context in settings.contexts}
        pipelines = {0: opened("plain", longest), **pipelines}
        prompts = [*load(HELD_OUT, None), *load(CODE, None)]
        human = [pipelines[0].generate(f"{each.text}\n\n", max_new_tokens=1) for each in prompts]
        text = [token_id for result in human for token_id in result.prompt_token_ids]
        if longest > len(text):
            raise InvalidRequest(f"The texts have {len(text)} tokens; ask for shorter prompts.", param="length")
        for number in range(settings.rounds + 1):
            for index, length in enumerate(settings.lengths):
                # No two begin alike: none finds its rows in the cache.
                start = _STRIDE * (number * len(settings.lengths) + index) % len(text)
                prompt = (text[start:] + text[:start])[:length]
                texts: set[tuple[int, ...]] = set()
                for context in list(pipelines)[:: 1 if number % 2 else -1]:
                    options = {"max_new_tokens": settings.new_tokens, "temperature": settings.temperature}
                    result = pipelines[context].generate(prompt, seed=_SEED, ignore_eos=True, **options)
                    texts.add(result.token_ids)
                    tick(f"{length} tokens, draft context {context}")
                    if number:
                        times, per_round = result.timings, len(result.token_ids) / result.num_rounds
                        found.append(Answer(context, length, per_round, times.ttft_s, times.tokens_per_s))
                assert len(texts) == 1, f"{len(texts)} different texts behind {length} tokens"
    return found


@app.command("draft-window")
def main(
    context: Annotated[str, typer.Option(help="Contexts of the draft.")] = "512,1024,2048,8192",
    length: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "1000,2000,3500,7000",
    mode: Annotated[Mode, typer.Option(help="How to speculate.")] = "pingpong",
    new_tokens: Annotated[int, typer.Option(min=8, help="Per answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of the models.")] = 2,
    temperature: Annotated[float, typer.Option(min=0, help="Of every answer.")] = 0.0,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Measure drafts that read only the end of a long prompt."""
    require_worker_extra()
    report.check_output(output)
    console = report.new_console()
    contexts, lengths = (tuple(sorted({int(value) for value in given.split(",")})) for given in (context, length))
    settings = WindowSettings(contexts, lengths, mode, new_tokens, rounds, threads, temperature)
    with report.Progress(console).running("answers", (rounds + 1) * len(lengths) * (1 + len(contexts))) as tick:
        found = measure(settings, tick)
    answers = [asdict(answer) for answer in found]
    record = {"benchmark": "draft-window", "provenance": provenance(), "settings": asdict(settings), "answers": answers}
    report.show_section(console, of_draft_window(record, output or Path("draft-window"), "draft-window"))
    report.emit(record, output)
