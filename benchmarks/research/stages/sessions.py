"""Several sessions on a target cut into stages: their steps one after the other, or one under way per stage.

The stages are real processes, one thread each, the coordinators in this one; the two ways have stages of their own and
are measured in turns.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from benchmarks.environment import provenance
from benchmarks.processes import WorkerProcess
from benchmarks.proxy import Proxy
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.cells import spread
from benchmarks.research.stages.cost import cuts, write_model
from benchmarks.statistics import Estimate, estimate, paired_speedup
from specsplit.core.sections import TargetSettings
from specsplit.model.extra import require_worker_extra
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.speculation.options import Speculation
from specsplit.stages.loading import load_coordinator
from specsplit.stages.wire.remote_chain import RemoteChain

WAYS = {"in turns": 1, "overlapping": None}
"""Steps under way at once; None for as many as there are stages."""


Rates = dict[str, list[float]]
"""Tokens per second of all sessions together, one per round, by way."""


@asynccontextmanager
async def served(
    model: Path, num_stages: int, rtt_ms: float, way: str, sessions: int, nodes: int
) -> AsyncIterator[Orchestrator]:
    """Give an orchestrator over a chain of its own."""
    from specsplit.stages.chain.runner import ChainOptions
    from specsplit.stages.chain.target import chain_target

    async with AsyncExitStack() as scope:
        addresses: list[str] = []
        for layers in cuts(num_stages):
            arguments = ("stage", "--model", str(model), "--layers", layers, "--threads", "1")
            stage = WorkerProcess(*arguments, "--sessions", str(sessions))
            scope.callback(stage.end)
            proxy = await scope.enter_async_context(Proxy(await asyncio.to_thread(stage.wait_ready)))
            proxy.latency_s = rtt_ms / 2e3
            addresses.append(proxy.address)
        coordinator = load_coordinator(TargetSettings(model=str(model), stages=tuple(addresses), sessions=sessions))
        link = RemoteChain(addresses, (), coordinator.expected)
        await link.connect()
        scope.push_async_callback(link.aclose)
        options = ChainOptions(max_pending=WAYS[way])
        target, _ = chain_target(coordinator.model, link, coordinator.ends, options=options)
        scope.push_async_callback(target.aclose)
        tokenizer = coordinator.model.tokenizer
        assert tokenizer is not None, "written with the model"
        speculation = Speculation(mode="lookup", nodes=nodes, depth=nodes) if nodes else Speculation(mode="plain")
        yield Orchestrator(target, None, tokenizer, speculation)


async def tokens_per_s(owner: Orchestrator, sessions: int, num_tokens: int, number: int) -> float:
    """Decode in all sessions at once."""
    requests = [
        Request(
            prompt_ids=tuple(1 + (number * 131 + session * 977 + index * 17) % 4000 for index in range(16)),
            max_new_tokens=num_tokens,
            ignore_eos=True,
        )
        for session in range(sessions)
    ]
    began_s = perf_counter()
    await asyncio.gather(*map(owner.generate, requests))
    return sessions * num_tokens / (perf_counter() - began_s)


@dataclass(frozen=True, slots=True)
class Load:
    """The chain and the sessions that decode on it at once."""

    num_stages: int
    num_sessions: int
    nodes: int
    num_tokens: int


async def run(rtts_ms: Sequence[float], load: Load, num_rounds: int, tick: Any) -> dict[str, Rates]:
    """Measure both ways in turns at every round trip, after one round that is not counted."""
    num_stages, sessions, nodes = load.num_stages, load.num_sessions, load.nodes
    found: dict[str, Rates] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model)
        for rtt_ms in rtts_ms:
            rates = found[f"{rtt_ms:g} ms"] = {way: list[float]() for way in WAYS}
            async with AsyncExitStack() as scope:
                owners = {
                    way: await scope.enter_async_context(served(model, num_stages, rtt_ms, way, sessions, nodes))
                    for way in WAYS
                }
                for number in range(num_rounds + 1):
                    for way in list(WAYS) if number % 2 else list(WAYS)[::-1]:
                        rate = await tokens_per_s(owners[way], sessions, load.num_tokens, number)
                        tick(f"{way}, {rtt_ms:g} ms")
                        if number:
                            rates[way].append(rate)
    return found


@app.command("stage-sessions")
def main(
    rtt_ms: Annotated[str, typer.Option(help="Round trips added to every link, in ms.")] = "0,10",
    stages: Annotated[int, typer.Option(min=2, help="Number of stages.")] = 2,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions that decode at once.")] = 4,
    nodes: Annotated[int, typer.Option(min=0, help="Of lookup's trees; 0 decodes plainly.")] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="Per session.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 7,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.")] = None,
) -> None:
    """Measure what it brings that steps of different sessions overlap in a chain of stages."""
    require_worker_extra()
    report.check_output(output)
    console = report.new_console()
    rtts = [float(value) for value in rtt_ms.split(",")]
    with report.Progress(console).running("measuring", len(rtts) * len(WAYS) * (rounds + 1)) as tick:
        found = asyncio.run(run(rtts, Load(stages, sessions, nodes, tokens), rounds, tick))
    before, after = WAYS
    listed = report.table(f"{sessions} sessions on {stages} stages, tokens/s in all", "round trip", *WAYS, "ratio")
    ratios: dict[str, Estimate] = {}
    for name, rates in found.items():
        rows = {way: [[1 / rate] for rate in rates[way]] for way in WAYS}
        ratios[name] = paired_speedup(rows[before], rows[after])
        shown = [spread(estimate(rates[way]), 0) for way in WAYS]
        listed.add_row(name, *shown, spread(ratios[name], 2))
    console.print(listed)
    record = {
        "benchmark": "stage_sessions",
        "provenance": provenance(),
        "settings": {
            "stages": stages,
            "sessions": sessions,
            "nodes": nodes,
            "tokens": tokens,
            "rounds": rounds,
            "threads": 1,
        },
        "tokens_per_s": found,
        "ratio": {name: ratio.to_dict() for name, ratio in ratios.items()},
    }
    report.emit(record, output)
