"""Times forwards of a few rows in each number format of the weights: alternately, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.settings import Pair
from benchmarks.statistics import estimate
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
from specsplit.model.runner import Runner

Record = dict[str, Any]
ROWS = (1, 2, 5, 8, 9, 16)
CONTEXT = 300
"""Tokens in front of a step."""


def measure(pair: Pair, formats: Sequence[str], num_rounds: int, threads: int, tell: Callable[[str], None]) -> Record:
    """Load the target in each format, and time forwards of each number of rows in turns; the first format is the base.

    Returns milliseconds by format and rows, the base's time over each other format's, and 8 rows' time over one's.
    """
    runners: dict[str, Runner] = {}
    for name in formats:
        runners[name] = load_model(pair.target, role="target", dtype=name, threads=threads, context=1024).runner
        runners[name].forward([SequenceInput(0, 0, list(range(CONTEXT)))])
        tell(f"{name} is loaded")
    torch.set_num_threads(threads)
    seconds: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in formats}
    for number in range(-1, num_rounds):
        for rows in ROWS:
            for name in formats if number % 2 else reversed(formats):
                elapsed_s = _forward_s(runners[name], rows)
                if number >= 0:
                    seconds[name][rows].append(elapsed_s)
    base = seconds[formats[0]]
    return {
        "forward_ms": {
            name: {rows: estimate([each * 1e3 for each in row]).to_dict() for rows, row in of_format.items()}
            for name, of_format in seconds.items()
        },
        "speedup": {
            f"{name} over {formats[0]}": {rows: _ratio(base[rows], seconds[name][rows]) for rows in ROWS}
            for name in formats[1:]
        },
        "8 rows / 1 row": {name: _ratio(of_format[8], of_format[1]) for name, of_format in seconds.items()},
    }


def _forward_s(runner: Runner, rows: int) -> float:
    """Return the time of the faster of two forwards behind the context: the first one may find cold caches."""
    step = [SequenceInput(0, CONTEXT, list(range(rows)), num_logits=rows)]
    taken: list[float] = []
    for _ in range(2):
        start_s = time.perf_counter()
        runner.forward(step)
        taken.append(time.perf_counter() - start_s)
    return min(taken)


def _ratio(ones: Sequence[float], others: Sequence[float]) -> Record:
    return estimate([one / other for one, other in zip(ones, others, strict=True)]).to_dict()
