"""`ablation`: what each part of `auto` is worth: `auto` without it, beside the whole and beside plain decoding.

One process and one pair of engines; the ways alternate prompt by prompt, and each learns into statistics of its own.
"""

# pyright: reportPrivateUsage=false
# It reaches into what it takes out.

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from benchmarks import workloads
from benchmarks.environment import Neighbours, provenance
from benchmarks.report.console import check_output, emit, new_console, table
from benchmarks.research.app import app
from benchmarks.research.cells import show_neighbours, spread
from benchmarks.research.resampling import BOOTSTRAP_SEED, CONFIDENCE, NUM_RESAMPLES
from benchmarks.statistics import Estimate, median
from specsplit.assembly.models import load_local
from specsplit.assembly.opening import open_workers
from specsplit.assembly.workers import Workers
from specsplit.core.defaults import Mode
from specsplit.core.settings import Settings, load_settings
from specsplit.core.types import SamplingParams
from specsplit.engine import event_loop
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation import acceptance, cost_model, rates, round_plan
from specsplit.speculation.statistics import SpeculationStats

SEED = 1
Patch = Callable[[], Any]


def _set(target: object, name: str, value: object) -> Patch:
    return lambda: mock.patch.object(target, name, value)


def _one(*_: object) -> float:
    return 1.0


def _alone(_: object, alone: float) -> float:
    return alone


def _never(*_: object) -> bool:
    return False


def _nothing(*_: object, **__: object) -> None:
    """Learn nothing."""


def _flat(profile: property) -> property:
    """Return the profile with one acceptance for all depths: the mean of what was counted."""

    def flattened(self: acceptance.DepthProfile) -> cost_model.Profile:
        whole = profile.fget(self)  # pyright: ignore[reportOptionalCall]
        seen = sum(seen for seen, _ in self._first) + acceptance.PRIOR_WEIGHT
        hits = sum(hits for _, hits in self._first) + acceptance.PRIOR_WEIGHT * acceptance.FIRST_CHILD_PRIOR
        step = acceptance.PROFILE_STEP
        return cost_model.Profile((round(hits / seen / step) * step,), whole.catch_by_rank)

    return property(flattened)


def _without_own(self: rates.RatePredictor, mode: cost_model.RoundMode, predicted: float) -> float:
    return predicted * self._all_rounds.factor(mode)


def _hasty(max_nodes: int, max_depth: int, branching: int) -> cost_model.Limits:
    return replace(_AUTO_LIMITS(max_nodes, max_depth, branching), margin=0.0, patience=1)


_AUTO_LIMITS = round_plan._auto_limits
# A part, and what stands in its place.
WITHOUT: dict[str, Patch] = {
    "correction": _set(rates.RateCorrections, "factor", _one),
    "correction of untried modes": _set(rates.RateCorrections, "_untried", _one),
    "correction apart from lookup": _set(rates.RatePredictor, "predict_without_lookup", _without_own),
    "forgiveness": _set(rates, "FORGIVENESS", 0.0),
    "lookup's share": _set(rates.LookupShare, "tokens_per_s", _alone),
    "acceptance by cell": _set(acceptance.Acceptance, "observe", _nothing),
    "acceptance by depth": _set(acceptance.DepthProfile, "profile", _flat(acceptance.DepthProfile.profile)),
    "probes": _set(rates.ProbeAllowance, "take", _never),
    "margin and patience": _set(round_plan, "_auto_limits", _hasty),
}


@dataclass(slots=True)
class Way:
    """One way to decode: what it has learned, by temperature, and the milliseconds a token of each request."""

    name: str
    mode: Mode
    lookup: bool = True
    patch: Patch = contextlib.nullcontext
    stats: dict[float, SpeculationStats] = field(default_factory=dict[float, SpeculationStats])
    ms: dict[float, list[float]] = field(default_factory=dict[float, list[float]])


@dataclass(frozen=True, slots=True)
class AblationSettings:
    """What is run."""

    temperatures: tuple[float, ...]
    num_prompts: int
    num_new_tokens: int
    num_rounds: int
    threads: int
    only: tuple[str, ...]
    lookup: bool


def ways(settings: AblationSettings) -> list[Way]:
    """Return plain decoding, `auto` twice (the second shows what is noise), and `auto` without each part."""
    wholes = [Way("plain", "plain"), Way("auto", "auto"), Way("auto again", "auto")]
    found = wholes + [Way(f"without {part}", "auto", patch=patch) for part, patch in WITHOUT.items()]
    for way in found:
        way.lookup = settings.lookup
    return [way for way in found if way in wholes or not settings.only or way.name[8:] in settings.only]


async def measure(settings: AblationSettings, tick: Callable[[str], None]) -> list[Way]:
    """Let each way continue each prompt, in an order drawn anew for each; the first round is not counted."""
    loaded = load_settings({"threads": settings.threads}).settings
    prompts = workloads.load(workloads.HELD_OUT, settings.num_prompts)
    found, rng = ways(settings), random.Random(SEED)
    async with open_workers(loaded, load_local(loaded)) as workers:
        texts = [(number, tuple(workers.tokenizer.encode(prompt.text))) for number, prompt in enumerate(prompts)]
        for temperature in settings.temperatures:
            for turn in range(settings.num_rounds + 1):
                for number, prompt_ids in texts:
                    sampling = SamplingParams(temperature=temperature)
                    request = Request(
                        prompt_ids=prompt_ids,
                        max_new_tokens=settings.num_new_tokens,
                        sampling=sampling,
                        seed=SEED + number,
                        ignore_eos=True,
                    )
                    texts_by_way: set[tuple[int, ...]] = set()
                    for way in rng.sample(found, len(found)):
                        result = await _run(workers, loaded, way, request)
                        texts_by_way.add(tuple(result.token_ids))
                        if turn and len(result.token_ids) > 1:
                            way.ms.setdefault(temperature, []).append(
                                1e3 * result.timings.decode_s / len(result.token_ids)
                            )
                    assert len(texts_by_way) == 1, f"texts differ for prompt {number}"
                tick(f"T {temperature:g}, round {turn}")
    return found


async def _run(workers: Workers, settings: Settings, way: Way, request: Request) -> Result:
    section = settings.orchestrator.model_copy(update={"mode": way.mode, "lookup": way.lookup})
    orchestrator = workers.orchestrator(section)
    if way.mode == "auto":
        stats = way.stats.setdefault(request.sampling.temperature, SpeculationStats())
        orchestrator.use_stats(stats, is_greedy=request.sampling.is_greedy)
    with way.patch():
        return await orchestrator.generate(request)


def compared(found: Sequence[Way], base: str, temperature: float) -> dict[str, Estimate]:
    """Return each way's speed over that of `base`: the median over requests run next to each other."""
    (base_ms,) = (way.ms[temperature] for way in found if way.name == base)
    return {
        way.name: _middle([one / other for one, other in zip(base_ms, way.ms[temperature], strict=True)])
        for way in found
    }


def _middle(ratios: list[float]) -> Estimate:
    """Return the median, and the interval that holds the true one in 19 of 20 samples like this (by resampling)."""
    rng = random.Random(BOOTSTRAP_SEED)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    edge = round((1 - CONFIDENCE) / 2 * NUM_RESAMPLES)
    return Estimate(median(ratios), medians[edge], medians[-edge - 1], tuple(ratios))


@app.command("ablation")
def ablation(
    temperatures: Annotated[str, typer.Option(help="Values separated by commas.")] = "0,0.7,1",
    prompts: Annotated[int, typer.Option(min=1, help="How many of the held-out prompts.")] = 6,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="How often every way does every prompt; one more warms up.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 1,
    only: Annotated[str, typer.Option(help="Parts to leave out, separated by commas; empty for each of them.")] = "",
    lookup: Annotated[bool, typer.Option(help="Whether lookup takes part.")] = True,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Measure what each part of `auto` is worth."""
    check_output(output)
    parts = tuple(filter(None, only.split(",")))
    settings = AblationSettings(
        tuple(map(float, temperatures.split(","))), prompts, new_tokens, rounds, threads, parts, lookup
    )
    console = new_console()
    neighbours = Neighbours([os.getpid()])
    found = event_loop.run(measure(settings, console.print))
    cells = {t: {base: compared(found, base, t) for base in ("plain", "auto")} for t in settings.temperatures}
    for temperature, by_base in cells.items():
        listed = table(f"T {temperature:g}, {threads} threads", "way", "/ plain", "/ auto")
        for way in found:
            listed.add_row(way.name, *[spread(by_base[base][way.name]) for base in ("plain", "auto")])
        console.print(listed)
    share = neighbours.share()
    show_neighbours(console, share)
    record = {
        "benchmark": "ablation",
        "provenance": provenance(),
        "neighbours_share": share,
        "settings": asdict(settings),
        "cells": [
            {"temperature": t, "over": base, "ways": {name: value.to_dict() for name, value in ratios.items()}}
            for t, by_base in cells.items()
            for base, ratios in by_base.items()
        ],
    }
    emit(record, output)
