"""Measures the cost of a round behind a longer and longer context (P14), and its law: a constant and so much per token.

Plain decoding and ping-pong of the embedded pair in one process, measured in turns behind prompts of each length; what
counts is the median round, since the first one of ping-pong also brings the prompt to the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.environment import provenance
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.cells import spread
from benchmarks.settings import Pair, ServedMode
from benchmarks.statistics import Estimate, estimate, median
from benchmarks.systems import Task
from benchmarks.workloads import CODE, load
from specsplit.model.extra import require_worker_extra

MODES = ("plain", "pingpong")
Times = dict[str, dict[int, list[float]]]
"""Milliseconds a round, one per round of measuring, by mode and context."""


def measure(contexts: Sequence[int], num_tokens: int, num_rounds: int, threads: int, tick: Any) -> Times:
    """Generate behind each context in each mode, in turns, after one round that is not counted."""
    from benchmarks.peers.ours import InProcess

    times: Times = {mode: {context: [] for context in contexts} for mode in MODES}
    modes = [ServedMode(mode, mode, lookup=False) for mode in MODES]
    with InProcess(threads, modes, Pair()) as pair:
        text = pair.encode("\n\n".join(prompt.text for prompt in load(CODE, None)))
        text *= 1 + max(contexts) // len(text)
        for number in range(num_rounds + 1):
            for context in contexts:
                task = Task(str(context), text[: context - num_tokens // 2], num_tokens)
                for system in pair.systems if number % 2 else pair.systems[::-1]:
                    arrivals = system.generate(task).arrivals
                    tick(f"{system.name}, {context} tokens")
                    if number:
                        times[system.name][context].append(round_ms(arrivals))
    return times


def round_ms(arrivals: Sequence[tuple[float, int]]) -> float:
    """Return the median of a generation's rounds, without the first, which brings the prompt to the draft."""
    seconds = [arrived_s for arrived_s, _ in arrivals]
    return median([(later - before) * 1e3 for before, later in pairwise(seconds[1:])])


def law(times: dict[int, list[float]]) -> tuple[float, float]:
    """Return the constant and the slope per 1,000 tokens, in ms, of least squares over the medians."""
    contexts = list(times)
    medians = [estimate(times[context]).median for context in contexts]
    slope, constant = np.polyfit(contexts, medians, 1).tolist()
    return constant, slope * 1e3


def growth(times: dict[int, list[float]]) -> Estimate:
    """Return the time behind the longest context over that behind the shortest, measured in the same rounds."""
    return estimate([last / first for first, last in zip(times[min(times)], times[max(times)], strict=True)])


@app.command("context-growth")
def main(
    context: Annotated[str, typer.Option(help="Tokens before a round, prompt included.")] = "256,512,1024,2048,4000",
    new_tokens: Annotated[int, typer.Option(min=24, help="Per generation.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Of the models.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.")] = None,
) -> None:
    """Measure how a round grows with the context."""
    require_worker_extra()
    report.check_output(output)
    console = report.new_console()
    contexts = sorted({int(value) for value in context.split(",")})
    with report.Progress(console).running("measuring", len(contexts) * len(MODES) * (rounds + 1)) as tick:
        times = measure(contexts, new_tokens, rounds, threads, tick)
    listed = report.table("Milliseconds a round", "mode", *map(str, contexts), "growth", "law")
    laws = {mode: law(found) for mode, found in times.items()}
    for mode, found in times.items():
        constant, slope = laws[mode]
        medians = [f"{median(found[length]):.2f}" for length in contexts]
        listed.add_row(mode, *medians, spread(growth(found), 2), f"{constant:.2f} + {slope:.2f} per 1,000")
    console.print(listed)
    record = {
        "benchmark": "context_growth",
        "provenance": provenance(),
        "settings": {"contexts": contexts, "new_tokens": new_tokens, "rounds": rounds, "threads": threads},
        "round_ms": {mode: {str(length): row for length, row in found.items()} for mode, found in times.items()},
        "growth": {mode: growth(found).to_dict() for mode, found in times.items()},
        "law_ms": {mode: {"constant": found[0], "per_1000_tokens": found[1]} for mode, found in laws.items()},
    }
    report.emit(record, output)
