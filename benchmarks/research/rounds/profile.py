"""`profile`: where a round's time goes in one generation in process, from its spans and from exclusive times.

Three generations: a warm-up, one with spans, one under cProfile, whose own cost is in its figures and nowhere else.
"""

from __future__ import annotations

import cProfile
import pstats
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import workloads
from benchmarks.environment import provenance, require_bench_extra
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.rounds import trace
from benchmarks.research.rounds.section import show_profile
from benchmarks.research.rounds.trace import Timeline
from benchmarks.settings import Pair, ServedMode, Shape, chosen_pair, is_inflated
from benchmarks.systems import Task
from specsplit.core import defaults
from specsplit.core.defaults import DeviceName, Dtype
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import SamplingParams
from specsplit.orchestrator.request import Result
from specsplit.telemetry.setup import trace_to_file

Record = dict[str, Any]
NUM_STEPS = 4
_PACKAGES = ("specsplit", "torch", "transformers", "asyncio", "benchmarks")


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Settings of a profile."""

    mode: str
    num_new_tokens: int = 128
    threads: int = 1
    temperature: float = 0.0
    seed: int = 0
    num_functions: int = 25
    pair: Pair = field(default=Pair())
    shape: Shape = field(default=Shape())

    def to_dict(self) -> Record:
        """Return the settings in JSON types."""
        return {
            "mode": self.mode,
            "num_new_tokens": self.num_new_tokens,
            "threads": self.threads,
            "temperature": self.temperature,
            "seed": self.seed,
            "is_inflated": is_inflated(self.pair.target),
            **asdict(self.pair),
            **asdict(self.shape),
        }


def run(settings: ProfileSettings, tick: Callable[[str], None]) -> Record:
    """Generate and return where the time went.

    Raises:
        SpecSplitError: there is no such mode, a model cannot be loaded, or the prompt does not fit.
    """
    from benchmarks.peers.ours import InProcess

    prompt = workloads.load(workloads.CODE, 1)[0]
    with ExitStack() as scope:
        served = scope.enter_context(
            InProcess(settings.threads, (ServedMode(settings.mode, settings.mode, settings.shape),), settings.pair)
        )
        tick("loading")
        prompt_ids = served.encode(prompt.text)
        if len(prompt_ids) + settings.num_new_tokens > served.context():
            raise InvalidRequest(
                f"The context has {served.context()} tokens; take fewer --new-tokens.", param="new_tokens"
            )
        sampling = SamplingParams(temperature=settings.temperature)
        task = Task(prompt.id, prompt_ids, settings.num_new_tokens, sampling, settings.seed)
        system = served.systems[0]
        system.generate(task)
        tick("warming up")
        timeline, result = _traced(lambda: system.generate(task).result, scope)
        tick("tracing")
        profiler = cProfile.Profile()
        profiler.enable()
        try:
            profiled = system.generate(task).result
        finally:
            profiler.disable()
        tick("profiling")
        assert profiled is not None, "our own systems tell all"
        functions = exclusive(pstats.Stats(profiler), profiled.num_rounds)
    return {
        "benchmark": "profile",
        "settings": settings.to_dict(),
        "provenance": provenance(),
        "num_rounds": result.num_rounds,
        "round_ms": timeline.to_dict()["round_ms"],
        "tokens_per_s": result.timings.tokens_per_s,
        "parts": parts(timeline),
        "packages": by_package(functions),
        "functions": functions[: settings.num_functions],
    }


def _traced(generate: Callable[[], Result | None], scope: ExitStack) -> tuple[Timeline, Result]:
    path = Path(scope.enter_context(tempfile.TemporaryDirectory())) / "trace.jsonl"
    with trace_to_file(path):
        result = generate()
    assert result is not None, "our own systems tell all"
    timeline = trace.timeline(trace.read([path]))
    if timeline is None:
        raise InvalidRequest("There was no round after the prompt; take more --new-tokens.", param="new_tokens")
    return timeline, result


def parts(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Return milliseconds per round and share of the time by part; draft and verify may run at once."""
    per_round = timeline.span_ms / len(timeline.rounds)
    return {part: {"ms": share * per_round, "share": share} for part, share in timeline.shares().items()}


def exclusive(stats: pstats.Stats, num_rounds: int) -> list[Record]:
    """Return functions by the time spent in themselves, most first, per round."""
    found: list[Record] = []
    table_of: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = stats.stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own_s, _, _) in table_of.items():
        place = _place(file)
        found.append(
            {
                "function": f"{place}:{line} {name}" if line else name,
                "package": _package(place, name),
                "calls": calls / num_rounds,
                "ms": own_s * 1e3 / num_rounds,
            }
        )
    return sorted(found, key=lambda each: -each["ms"])


def _place(file: str) -> str:
    """Return a path from its package on, so that it names no machine."""
    parts_of = Path(file).parts
    for index, part in enumerate(parts_of):
        if part in _PACKAGES and Path(*parts_of[: index + 1]).suffix == "" and index + 1 < len(parts_of):
            return "/".join(parts_of[index:])
    return parts_of[-1] if parts_of else file


def _package(place: str, name: str) -> str:
    """Return whose time it is; waiting for a descriptor or a lock is nobody's."""
    if "poll" in name or "'acquire' of '_thread" in name:
        return "waiting"
    head = place.partition("/")[0]
    if head in _PACKAGES:
        return "/".join(place.split("/")[:2]) if head == "specsplit" else head
    return "torch" if "torch" in name else "other"


def by_package(functions: list[Record]) -> dict[str, float]:
    """Return exclusive milliseconds per round by package, most first."""
    found: dict[str, float] = {}
    for each in functions:
        found[each["package"]] = found.get(each["package"], 0.0) + each["ms"]
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@app.command()
def profile(
    mode: Annotated[str, typer.Option(help="Of the orchestrator.")] = "pingpong",
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens.")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    functions: Annotated[int, typer.Option(min=1, help="How many to list.")] = 25,
    target: Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id of the target.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id of the draft.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of both models.")] = "fp32",
    device: Annotated[DeviceName, typer.Option(help="Of both models.")] = "cpu",
    nodes: Annotated[int | None, typer.Option(min=1, help="Tree nodes verified per round at most.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree at most.")] = None,
    branching: Annotated[int, typer.Option(min=1, help="Children of a node.")] = defaults.DEFAULT_BRANCHING,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Show where a round's time goes in one generation in process."""
    report.check_output(output)
    require_bench_extra()
    chosen, shape = chosen_pair(target, draft, dtype, device), Shape(nodes, depth, branching)
    settings = ProfileSettings(mode, new_tokens, threads, temperature, seed, functions, chosen, shape)
    console = report.new_console()
    with report.Progress(console).running("profile", NUM_STEPS) as tick:
        found = run(settings, tick)
    show_profile(console, found)
    report.emit(found, output)
