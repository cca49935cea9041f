"""Costs of cutting a target: plain decoding and a long prefill over 1, 2 and 4 stages on loopback (P11, P12, P13).

The model is the embedded target, a folder, or `made`: 8 layers x 256 with random weights. Only its time matters, and
nothing is said of acceptance. Every placement is a set of real processes, one thread each, measured in turns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from benchmarks.environment import provenance
from benchmarks.processes import WorkerProcess
from benchmarks.proxy import Proxy
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.cells import spread
from benchmarks.statistics import Bar, estimate, paired_speedup
from specsplit.assembly.links import remote_workers
from specsplit.core.sections import TargetSettings
from specsplit.core.settings import Settings
from specsplit.model.extra import require_worker_extra
from specsplit.model.source import resolve
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.speculation.options import Speculation

MADE, NUM_LAYERS, HIDDEN = "made", 8, 256
PREFILL_TOKENS = 433
WHOLE = "one process"
SEED = 20_261


@dataclass(frozen=True, slots=True)
class Placement:
    """A target: in one process, or over stages with a round trip added to every link between them."""

    num_stages: int = 0
    rtt_ms: float = 0.0
    has_own: bool = False
    """Whether the target holds the first stage itself."""

    @property
    def name(self) -> str:
        if not self.num_stages:
            return WHOLE
        plural = "s" if self.num_stages > 1 else ""
        own = ", the first its own" if self.has_own else ""
        return f"{self.num_stages} stage{plural}, {self.rtt_ms:g} ms{own}"


@dataclass(slots=True)
class Measured:
    """Seconds by placement, one per round."""

    token_s: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])
    """Seconds of a token in plain decoding."""
    prefill_s: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])
    """From the request to the first token behind `PREFILL_TOKENS`."""


def write_model(folder: Path) -> None:
    """Write the model that is measured."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    cast(Any, torch).manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    cast(Any, LlamaForCausalLM(config)).save_pretrained(folder)
    for file in Path(resolve("embedded", "target")[0]).glob("*token*.json"):
        (folder / file.name).write_bytes(file.read_bytes())


def cuts(num_stages: int, num_layers: int = NUM_LAYERS) -> list[str]:
    """Return the even ranges of layers."""
    bounds = [num_layers * index // num_stages for index in range(num_stages + 1)]
    return [f"{start}:{end}" for start, end in itertools.pairwise(bounds)]


class Bench:
    """All placements, up and connected; they share the event loop and take turns."""

    def __init__(self, model: Path, placements: Sequence[Placement]) -> None:
        self._model, self._placements = model, placements
        self._num_layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
        self._processes, self._links = ExitStack(), AsyncExitStack()
        self._owners: dict[str, Orchestrator] = {}

    async def __aenter__(self) -> Bench:
        for placement in self._placements:
            address = await self._start(placement)
            settings = Settings(target=TargetSettings(address=address))
            workers = await self._links.enter_async_context(remote_workers(settings))
            self._owners[placement.name] = Orchestrator(
                workers.verifier, None, workers.tokenizer, Speculation(mode="plain")
            )
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._links.aclose()
        self._processes.close()

    async def _start(self, placement: Placement) -> str:
        """Start a placement's processes and return the target's address."""
        model = ("--model", str(self._model))
        if not placement.num_stages:
            return await asyncio.to_thread(self._worker("target", *model).wait_ready)
        layers = self._cuts(placement)
        own = ("--layers", layers.pop(0)) if placement.has_own else ()
        stages = [self._worker("stage", *model, "--layers", each) for each in layers]
        addresses = [await asyncio.to_thread(stage.wait_ready) for stage in stages]
        if placement.rtt_ms:
            proxies = [await self._links.enter_async_context(Proxy(address)) for address in addresses]
            for proxy in proxies:
                proxy.latency_s = placement.rtt_ms / 2e3
            addresses = [proxy.address for proxy in proxies]
        coordinator = self._worker("target", *model, *own, "--stages", ",".join(addresses))
        return await asyncio.to_thread(coordinator.wait_ready)

    def _cuts(self, placement: Placement) -> list[str]:
        return cuts(placement.num_stages, self._num_layers)

    def _worker(self, *arguments: str) -> WorkerProcess:
        worker = WorkerProcess(*arguments, "--threads", "1")
        self._processes.callback(worker.end)
        return worker

    async def measure(self, name: str, num_tokens: int, number: int) -> tuple[float, float]:
        """Return seconds per token of plain decoding, and seconds of the prefill."""
        owner = self._owners[name]
        short = Request(prompt_ids=_ids(16, number), max_new_tokens=num_tokens, ignore_eos=True)
        decoded = (await owner.generate(short)).timings
        long = Request(prompt_ids=_ids(PREFILL_TOKENS, number + 1000), max_new_tokens=1, ignore_eos=True)
        prefilled = (await owner.generate(long)).timings
        return 1 / decoded.tokens_per_s, prefilled.ttft_s


def _ids(count: int, number: int) -> tuple[int, ...]:
    return tuple(1 + (number * 131 + index * 17) % 4000 for index in range(count))


async def run(source: str, placements: Sequence[Placement], num_tokens: int, num_rounds: int, tick: Any) -> Measured:
    """Measure all placements in turns, after one round that is not counted."""
    found = Measured()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model" if source == MADE else Path(resolve(source, "target")[0])
        if source == MADE:
            write_model(model)
        async with Bench(model, placements) as bench:
            for number in range(num_rounds + 1):
                for placement in placements if number % 2 else placements[::-1]:
                    token_s, prefill_s = await bench.measure(placement.name, num_tokens, number)
                    tick(placement.name)
                    if number:
                        found.token_s.setdefault(placement.name, []).append(token_s)
                        found.prefill_s.setdefault(placement.name, []).append(prefill_s)
    return found


def bars_of(found: Measured) -> list[Bar]:
    """Return the bars that can be checked: no stage, one and two stages without added round trips."""
    whole, one, two = Placement().name, Placement(1).name, Placement(2).name
    if not {whole, one, two} <= set(found.token_s):
        return []
    uncut = paired_speedup(_rows(found.token_s[whole]), _rows(found.token_s[two]))
    added = [1e3 * (after - before) for before, after in zip(found.token_s[one], found.token_s[two], strict=True)]
    rates = [1 / seconds for seconds in found.token_s[two]]
    prefill = paired_speedup(_rows(found.prefill_s[one]), _rows(found.prefill_s[two]))
    return [
        Bar("P11", "ms a round that the second stage adds", estimate(added), "<=", 3),
        Bar("P12", "two stages, plain decoding, tokens/s", estimate(rates), ">=", 100),
        Bar("P12", "two stages / uncut, plain decoding", uncut, ">=", 0.75),
        Bar("P13", f"{PREFILL_TOKENS} tokens of prefill, 2 stages / 1 stage", prefill, ">=", 0.9),
    ]


def _rows(values: Sequence[float]) -> list[list[float]]:
    return [[value] for value in values]


@app.command("stages")
def main(
    model: Annotated[str, typer.Option(help="Target's folder, embedded, or made: 8 layers x 256 at random.")] = MADE,
    rtt_ms: Annotated[str, typer.Option(help="Round trips on every link of two stages, in ms.")] = "0,2,10",
    stages: Annotated[str, typer.Option(help="Numbers of stages, without added round trips.")] = "1,2,4",
    tokens: Annotated[int, typer.Option(min=2, help="Of plain decoding.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 7,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.")] = None,
) -> None:
    """Measure a target cut into stages."""
    require_worker_extra()
    report.check_output(output)
    console = report.new_console()
    placements = [Placement(), *(Placement(int(count)) for count in stages.split(","))]
    placements.append(Placement(2, has_own=True))
    placements += [Placement(2, float(rtt)) for rtt in rtt_ms.split(",") if float(rtt)]
    progress = report.Progress(console)
    with progress.running("measuring", len(placements) * (rounds + 1)) as tick:
        found = asyncio.run(run(model, placements, tokens, rounds, tick))
    listed = report.table(f"{model}, one thread a process", "target", "tokens/s", "prefill ms")
    for name, seconds in found.token_s.items():
        rate = estimate([1 / value for value in seconds])
        listed.add_row(name, spread(rate, 0), spread(estimate([1e3 * value for value in found.prefill_s[name]]), 0))
    console.print(listed)
    bars = bars_of(found)
    for bar in bars:
        met = "met" if bar.is_met else "MISSED"
        console.print(f"{bar.id}: {bar.measure} {spread(bar.value, 2)}, bar {bar.relation} {bar.bound:g}: {met}")
    record = {
        "benchmark": "stages",
        "provenance": provenance(),
        "settings": {"model": model, "tokens": tokens, "rounds": rounds, "threads": 1},
        "token_s": found.token_s,
        "prefill_s": found.prefill_s,
        "bars": [bar.to_dict() for bar in bars],
    }
    report.emit(record, output)
