"""Measures systems on a made pair: alternately, behind prompts of each context, at each temperature. Derives ratios."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.agreement import differences
from benchmarks.environment import Neighbours
from benchmarks.processes import Child
from benchmarks.research.real_shapes import formats as forward_formats
from benchmarks.research.real_shapes import loading, reading
from benchmarks.research.real_shapes.make import MadePair, made_pair
from benchmarks.research.real_shapes.serving import BARE, DRAFTED_WHOLE, OUR_MODES, THEIR_WAYS, OurModes, TheirWays
from benchmarks.research.real_shapes.shapes import find_shape
from benchmarks.settings import Pair
from benchmarks.statistics import Estimate, estimate
from benchmarks.systems import Sample, System, Task
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import SamplingParams
from specsplit.model.vocab_file import ALL as ALL_TOKENS

Record = dict[str, Any]
Tell = Callable[[str], None]
TOP_P = 0.9
NUM_WARM_UPS = 1
_ROOM = 64
"""Tokens of context beyond prompt and answer."""


@dataclass(frozen=True, slots=True)
class RealShapeSettings:
    """What is measured."""

    shape: str
    cache: Path
    systems: tuple[str, ...]
    agreement: float = 0.8
    contexts: tuple[int, ...] = (512,)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    draft_vocab: str | None = None
    num_new_tokens: int = 64
    num_rounds: int = 3
    threads: int = 2
    seed: int = 0
    has_parts: bool = True
    device: str = "cpu"

    def to_dict(self) -> Record:
        """Return the settings in JSON types, without the cache's place."""
        return {name: value for name, value in asdict(self).items() if name != "cache"}


def check(settings: RealShapeSettings) -> None:
    """Refuse systems that do not exist.

    Raises:
        InvalidRequest: naming those that do.
    """
    known = (*OUR_MODES, *DRAFTED_WHOLE, BARE, *THEIR_WAYS)
    for name in settings.systems:
        if name not in known:
            raise InvalidRequest(f"There is no system {name!r}; there are {', '.join(known)}.", param="systems")


def run(settings: RealShapeSettings, tell: Tell) -> Record:
    """Make the pair if need be and measure every cell."""
    check(settings)
    made = _made(settings, tell)
    pair = Pair(made.target, made.draft, "bf16", settings.device)
    facts = {name: value for name, value in asdict(made).items() if name not in ("target", "draft")}
    ours = [name for name in settings.systems if name in (*OUR_MODES, BARE)]
    whole = [name for name in settings.systems if name in DRAFTED_WHOLE]
    theirs = [name for name in settings.systems if name in THEIR_WAYS]
    context = max(settings.contexts) + settings.num_new_tokens + _ROOM
    with ExitStack() as scope:
        children: list[Child] = []
        # One after the other: loading at once would need the memory of both checkpoints twice.
        for names, vocab in ((ours, settings.draft_vocab), (whole, ALL_TOKENS)):
            if names:
                modes = partial(OurModes, settings.threads, names, pair, context, vocab)
                children.append(_child(scope, "our modes", modes))
        if theirs:
            children.append(_child(scope, "transformers", partial(TheirWays, settings.threads, theirs, pair)))
        systems = [system for child in children for system in child.wait_systems()]
        neighbours = Neighbours([child.pid for child in children])
        cells = [
            _cell(settings, systems, children[0] if ours else None, length, temperature, tell)
            for length in settings.contexts
            for temperature in settings.temperatures
        ]
        return {"pair": facts, "cells": cells, "neighbours_share": neighbours.share()}


def _made(settings: RealShapeSettings, tell: Tell) -> MadePair:
    """Return the pair of the settings, made if need be."""
    return made_pair(
        find_shape(settings.shape), settings.agreement, settings.cache, settings.seed, tell, settings.device
    )


def _child(scope: ExitStack, name: str, factory: Any) -> Child:
    return scope.enter_context(Child(name, factory))


def _cell(
    settings: RealShapeSettings,
    systems: Sequence[System],
    ours: Child | None,
    length: int,
    temperature: float,
    tell: Tell,
) -> Record:
    samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
    tasks = [make_task(settings, length, temperature, number) for number in range(settings.num_rounds)]
    for number in range(-NUM_WARM_UPS, settings.num_rounds):
        task = make_task(settings, length, temperature, number)
        # Every system comes first, and last, about as often as any other.
        place = number % len(systems)
        for system in [*systems[place:], *systems[:place]]:
            sample = system.generate(task)
            if number >= 0:
                samples[system.name].append(sample)
    rates = {name: [(settings.num_new_tokens - 1) / _decode_s(each) for each in row] for name, row in samples.items()}
    ttfts_s = {name: [each.ttft_s for each in row if each.ttft_s] for name, row in samples.items()}
    tell(
        f"context {length}, T = {temperature:g}: " + ", ".join(f"{name} {max(row):.1f}" for name, row in rates.items())
    )
    texts = _compare_texts(tasks, samples, ours) if ours is not None else None
    if texts is not None and texts["differences"]:
        tell(f"{len(texts['differences'])} texts differ from plain decoding's, which promised {texts['exactness']}.")
    parts: Record = {}
    if ours is not None and settings.has_parts:
        task = make_task(settings, length, temperature, settings.num_rounds)
        parts = {name: ours.ask("parts", name, task) for name in samples if name in OUR_MODES}
    return {
        "context": length,
        "temperature": temperature,
        "tokens_per_s": {name: estimate(row).to_dict() for name, row in rates.items()},
        "ttft_s": {name: estimate(row).to_dict() for name, row in ttfts_s.items() if row},
        "ratios": {name: value.to_dict() for name, value in (ratios(rates) | ttft_ratio(ttfts_s)).items()},
        "texts": texts,
        "acceptance": {name: _acceptance(row) for name, row in samples.items() if row[0].result is not None},
        "parts_ms": parts,
    }


def _compare_texts(tasks: Sequence[Task], samples: dict[str, list[Sample]], ours: Child) -> Record | None:
    """Return how many texts of our modes were compared with plain decoding's, what was promised, and what differs."""
    rows = {name: row for name, row in samples.items() if row[0].result is not None}
    if "plain" not in rows:
        return None
    found: list[Record] = []
    for number, task in enumerate(tasks):

        def margin(token_ids: Sequence[int], task: Task = task) -> float:
            return ours.ask("top2_margin", list(token_ids), task.sampling, task.seed)

        listed = differences([task], "plain", [{name: [row[number]] for name, row in rows.items()}], margin)
        found += [each.to_dict() for each in listed]
    promised = {sample.result.exactness for row in rows.values() for sample in row if sample.result is not None}
    exactness = "bits" if promised == {"bits"} else "near ties"
    return {"num_compared": len(tasks) * (len(rows) - 1), "exactness": exactness, "differences": found}


def make_task(settings: RealShapeSettings, length: int, temperature: float, number: int) -> Task:
    """Return the task of a round: a prompt of its own, the same for all systems."""
    drawn = random.Random(f"{settings.seed} {length} {number}")
    frequent = find_shape(settings.shape).config["vocab_size"] // 8
    prompt_ids = tuple(drawn.randrange(frequent) for _ in range(length))
    sampling = SamplingParams(temperature=temperature, top_p=TOP_P if temperature else 1.0)
    return Task(f"{length}-{number}", prompt_ids, settings.num_new_tokens, sampling, settings.seed + number + 1)


def ratios(rates: dict[str, list[float]]) -> dict[str, Estimate]:
    """Return the ratios that have a bar, each of rates measured in the same round."""
    wanted = (
        ("plain", "generate"),
        ("plain", BARE),
        ("auto", "plain"),
        ("pingpong", "plain"),
        ("pingpong", "assisted"),
        ("pingpong", "assisted-constant"),
        ("pingpong", "pingpong-whole-head"),
        ("auto", "auto-whole-head"),
        ("lookup", "plain"),
        ("lookup", "prompt-lookup"),
        ("assisted", "generate"),
    )
    return {
        f"{ours} / {theirs}": estimate([a / b for a, b in zip(rates[ours], rates[theirs], strict=True)])
        for ours, theirs in wanted
        if ours in rates and theirs in rates
    }


def ttft_ratio(ttfts_s: dict[str, list[float]]) -> dict[str, Estimate]:
    """Return plain decoding's time to the first token over that of `generate`, if both were measured."""
    ours, theirs = ttfts_s.get("plain", []), ttfts_s.get("generate", [])
    pairs = list(zip(ours, theirs, strict=True)) if ours and theirs else []
    return {"TTFT, plain / generate": estimate([a / b for a, b in pairs])} if pairs else {}


def _decode_s(sample: Sample) -> float:
    assert sample.decode_s is not None, "every system here tells"
    return sample.decode_s


def _acceptance(samples: Sequence[Sample]) -> Record:
    """Return tokens per round and the rounds by mode over all samples of one system."""
    results = [sample.result for sample in samples if sample.result is not None]
    modes: dict[str, int] = {}
    for result in results:
        for mode, count in result.rounds_by_mode.items():
            modes[mode] = modes.get(mode, 0) + count
    rounds = max(1, sum(result.num_rounds for result in results))
    tokens = sum(len(result.token_ids) - 1 for result in results)
    reused = sum(result.num_reused_tokens for result in results)
    return {"tokens_per_round": tokens / rounds, "rounds_by_mode": modes, "num_reused_tokens": reused}


def run_loading(settings: RealShapeSettings, tell: Tell) -> Record:
    """Make the pair if need be; measure load time and memory of its target, `num_rounds` times."""
    made = _made(settings, tell)
    rounds: list[Record] = []
    for number in range(settings.num_rounds + NUM_WARM_UPS):
        pair = Pair(made.target, None, "bf16", settings.device)
        found = loading.measure(pair, settings.threads, is_reversed=number % 2 == 1)
        tell(", ".join(f"{name} {found[name]['seconds']:.1f} s" for name in loading.PROGRAMS))
        if number >= NUM_WARM_UPS:  # the first one warms the page cache and proves what is kept
            rounds.append(found)
    ratio = estimate([each["ours"]["seconds"] / each["transformers"]["seconds"] for each in rounds])
    # The KV cache holds a dozen rows then, so it is left out of what is needed.
    rss = estimate(
        [each["ours"]["rss_bytes"] / (each["weight_bytes"] + each["import"]["rss_bytes"]) for each in rounds]
    )
    return {"loading": rounds, "load_ratio": ratio.to_dict(), "rss_ratio": rss.to_dict()}


def run_reading(settings: RealShapeSettings, tell: Tell) -> Record:
    """Make the pair if need be; measure time and memory of plain decoding behind prompts of each length."""
    made = _made(settings, tell)
    pair = Pair(made.target, None, "bf16", settings.device)
    rounds: list[Record] = []
    for number in range(settings.num_rounds):
        for length in settings.contexts:
            found = reading.measure(pair, make_task(settings, length, 0.0, number), settings.threads, _ROOM)
            loaded, work = (size / 2**20 for size in (found["loaded"]["rss_bytes"], found["work_bytes"]))
            tell(
                f"context {length}: first token {found['ttft_s']:.1f} s, then {found['tokens_per_s']:.1f} tokens/s;"
                f" {loaded:.0f} MiB after the load, and at the most {work:.0f} beside these and keys and values"
            )
            rounds.append(found)
    shares = [each["neighbours_share"] for each in rounds]
    return {"reading": rounds, "neighbours_share": None if None in shares else max(shares)}


def run_formats(settings: RealShapeSettings, formats: Sequence[str], tell: Tell) -> Record:
    """Make the pair if need be; measure forwards of its target in each number format."""
    made = _made(settings, tell)
    pair = Pair(made.target, None, formats[0], settings.device)
    neighbours = Neighbours([])
    found = forward_formats.measure(pair, formats, settings.num_rounds, settings.threads, tell)
    return {**found, "neighbours_share": neighbours.share()}
