"""Measures the cost of a round beside the models (P4), mode by mode: in one process, and with two workers on loopback.

Where draft and target take turns that is the time of decoding without the forwards of both, over the rounds: in
ping-pong, and in one process with a target as fast as the embedded one. Where the draft works ahead or is asked beside
a verify, not all that it does is on the critical path. There only so much of its work is taken off as must have been
done while the text waited for it: what a call's device did, less the time from the call to the beginning of the wait.
So the critical path has at most that much beside the models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import provenance
from benchmarks.peers.ours import InProcess, Ours
from benchmarks.peers.ours_remote import worker
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.cells import spread
from benchmarks.settings import Pair, ServedMode
from benchmarks.statistics import Estimate, estimate
from benchmarks.systems import System, Task
from benchmarks.workloads import CODE, load
from specsplit.assembly.links import remote_workers
from specsplit.core.errors import InvalidRequest
from specsplit.core.sections import DraftSettings, TargetSettings
from specsplit.core.settings import Settings
from specsplit.engine import event_loop
from specsplit.model.extra import require_worker_extra
from specsplit.orchestrator.request import Result

BOUNDS_MS = {"in process": 1.0, "loopback": 2.0}
"""P4."""
ALONE = ("plain", "lookup", "pingpong", "auto")
"""In one process draft and target take turns; forwards that overlap in time there share the cores."""
APART = ("pingpong", "overlap", "stream", "auto")
IN_TURNS = ("plain", "lookup", "pingpong")
"""Modes in which a draft elsewhere computes only while the text waits for it."""
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settled:
    """How it is measured."""

    num_prompts: int = 3
    num_new_tokens: int = 96
    num_rounds: int = 7
    threads: int = 2
    """Threads that both models share."""

    def tasks(self, encode: Callable[[str], Sequence[int]]) -> list[Task]:
        """Return what is generated, greedily."""
        prompts = load(CODE, self.num_prompts)
        return [Task(prompt.id, tuple(encode(prompt.text)), self.num_new_tokens) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Found:
    """Milliseconds a round of one mode."""

    whole: Estimate
    beside: Estimate
    is_bound: bool
    """The draft worked ahead: `beside` may hold some of its work, and the true figure is smaller."""

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types."""
        return {"round_ms": self.whole.to_dict(), "beside_ms": self.beside.to_dict(), "is_bound": self.is_bound}


def in_process(modes: Sequence[str], settled: Settled, tick: Tick) -> dict[str, Found]:
    """Measure modes over one loaded pair."""
    with InProcess(settled.threads, [ServedMode(mode, mode) for mode in modes], Pair()) as pair:
        return measured(pair.systems, settled.tasks(pair.encode), settled.num_rounds, tick, in_turns=modes)


def on_loopback(modes: Sequence[str], settled: Settled, tick: Tick) -> dict[str, Found]:
    """Measure modes over two workers, each with half of the threads."""
    with ExitStack() as scope:
        share = max(1, settled.threads // 2)
        started = {role: worker(role, share, Pair()) for role in ("target", "draft")}
        for process in started.values():
            scope.callback(process.end)
        addresses = {role: process.wait_ready() for role, process in started.items()}
        links, loop = AsyncExitStack(), scope.enter_context(event_loop.runner())
        scope.callback(lambda: loop.run(links.aclose()))
        reached = Settings(
            target=TargetSettings(address=addresses["target"]), draft=DraftSettings(address=addresses["draft"])
        )
        workers = loop.run(links.enter_async_context(remote_workers(reached)))
        systems = [Ours(ServedMode(mode, mode), loop, workers) for mode in modes]
        return measured(systems, settled.tasks(workers.tokenizer.encode), settled.num_rounds, tick, IN_TURNS)


def measured(
    systems: Sequence[System], tasks: Sequence[Task], num_rounds: int, tick: Tick, in_turns: Sequence[str]
) -> dict[str, Found]:
    """Generate with each system in turns, the first round to warm up."""
    results: dict[str, list[list[Result]]] = {system.name: [] for system in systems}
    for number in range(num_rounds + 1):
        for system in systems if number % 2 else systems[::-1]:
            found = [result for task in tasks if (result := system.generate(task).result) is not None]
            tick(system.name)
            if number:
                results[system.name].append(found)
    return {name: found_in(rounds, is_bound=name not in in_turns) for name, rounds in results.items()}


def found_in(rounds: Sequence[Sequence[Result]], *, is_bound: bool) -> Found:
    """Return what the results of one mode say; the generations of a round of measuring are pooled."""
    whole: list[float] = []
    beside: list[float] = []
    for results in rounds:
        timings, num_rounds = [result.timings for result in results], sum(result.num_rounds for result in results)
        decode_s = sum(each.decode_s for each in timings)
        drafts_s = [each.draft_waited_s if is_bound else each.draft_device_s for each in timings]
        models_s = sum(drafts_s) + sum(each.target_device_s for each in timings)
        whole.append(decode_s * 1e3 / num_rounds)
        beside.append((decode_s - models_s) * 1e3 / num_rounds)
    return Found(estimate(whole), estimate(beside), is_bound)


def chosen_modes(text: str, of: Sequence[str]) -> list[str]:
    named = [name.strip() for name in text.split(",") if name.strip()]
    unknown = set(named) - {*ALONE, *APART}
    if unknown or not named:
        raise InvalidRequest(f"modes are of {', '.join(dict.fromkeys([*ALONE, *APART]))}.", param="modes")
    return [mode for mode in of if mode in named]


@app.command("critical-path")
def main(
    modes: Annotated[str, typer.Option(help="Separated by commas.")] = "plain,lookup,pingpong,overlap,stream,auto",
    prompts: Annotated[int, typer.Option(min=1, help="How many of data/code_prompts.jsonl.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=16, help="Per generation.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Of both models together.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Measure what a round costs beside the models, mode by mode."""
    alone, apart = chosen_modes(modes, ALONE), chosen_modes(modes, APART)
    report.check_output(output)
    require_worker_extra()
    console = report.new_console()
    settled = Settled(prompts, new_tokens, rounds, threads)
    with report.Progress(console).running("measuring", (len(alone) + len(apart)) * (rounds + 1)) as tick:
        places = {
            "in process": in_process(alone, settled, tick) if alone else {},
            "loopback": on_loopback(apart, settled, tick) if apart else {},
        }
    listed = report.table("Milliseconds a round", "", "whole", "beside the models", "bar")
    for place, found in places.items():
        for mode, each in found.items():
            bound, at_most = BOUNDS_MS[place], "at most " if each.is_bound else ""
            verdict = "met" if each.beside.median <= bound else "open" if each.is_bound else "missed"
            beside = at_most + spread(each.beside)
            listed.add_row(f"{mode}, {place}", spread(each.whole), beside, f"{bound:g}: {verdict}")
    console.print(listed)
    record = {
        "benchmark": "critical_path",
        "provenance": provenance(),
        "settings": asdict(settled),
        "bounds_ms": BOUNDS_MS,
        "places": {place: {mode: each.to_dict() for mode, each in found.items()} for place, found in places.items()},
    }
    report.emit(record, output)
