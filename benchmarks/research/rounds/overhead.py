"""Measures what tracing and mTLS add to a round's processor time, over all processes of the embedded pair.

In a turn each prompt is generated three times in random order: without the thing, with it, and without it again, whose
ratio to the first shows what the machine alone does. A machine's speed changes from second to second, so the three are
neighbours. Rounds of ping-pong are the same ones each time. Where workers have processes of their own these are started
anew every few turns, since the luck of one process (addresses, hash seeds) counts for more than what is measured.
"""

from __future__ import annotations

import gc
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import provenance
from benchmarks.peers.ours import InProcess, OnLoop, Ours
from benchmarks.peers.ours_remote import WithWorkers
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.settings import Pair, ServedMode
from benchmarks.statistics import median
from benchmarks.systems import Task
from benchmarks.workloads import CODE, load
from specsplit.assembly.links import remote_workers
from specsplit.cli.certs import write_certificates
from specsplit.core.errors import InvalidRequest
from specsplit.core.sections import DraftSettings, OrchestratorSettings, TargetSettings
from specsplit.core.settings import Settings, override
from specsplit.model.extra import require_worker_extra
from specsplit.telemetry.setup import trace_to_file

BOUNDS = {"spans in process": 0.02, "spans on loopback": 0.02, "mTLS on loopback": 0.05}
"""Largest part of a round's processor time, by kind."""
MODE = ServedMode("pingpong", "pingpong")
_ROLES = ("target", "draft")
_SETTLE_S = 0.15
"""Spans are written a little after they end."""
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OverheadSettings:
    """How much is generated, and how often."""

    num_turns: int = 40
    num_starts: int = 5
    """Starts of the processes of workers, over which the turns are spread."""
    num_prompts: int = 4
    num_new_tokens: int = 96


@dataclass(frozen=True, slots=True)
class Overhead:
    """Processor milliseconds a round of one kind, one entry per turn."""

    without_ms: list[float]
    with_ms: list[float]
    control_ms: list[float]

    def shares(self, ms: Sequence[float]) -> list[float]:
        """Return by which part more than `without_ms` each turn took."""
        return [each / base - 1 for each, base in zip(ms, self.without_ms, strict=True)]


@dataclass(frozen=True, slots=True)
class _Spent:
    """What one generation took of all processors."""

    processor_s: float
    num_rounds: int


class Side(WithWorkers):
    """Two workers in processes of their own, with spans or with certificates or with neither."""

    def __init__(self, *, traces: Path | None = None, certificates: Path | None = None) -> None:
        super().__init__({})
        self._certificates = certificates
        for role in _ROLES:
            options = [] if traces is None else ["--trace-file", str(traces / f"{role}.jsonl")]
            for name, value in self._link(role).items():
                options += [f"--{name.replace('_', '-')}", value]
            self._start({role: 1}, Pair(), *options)

    def _link(self, role: str) -> dict[str, str]:
        folder = self._certificates
        files = {"tls_cert": f"{role}.pem", "tls_key": f"{role}.key", "tls_ca": "ca.pem"}
        return {} if folder is None else {name: str(folder / file) for name, file in files.items()}

    async def _open(self) -> None:
        await super()._open()
        settings = Settings(
            target=TargetSettings(address=self._addresses["target"]),
            draft=DraftSettings(address=self._addresses["draft"]),
            orchestrator=override(OrchestratorSettings(), **self._link("orchestrator")),
        )
        workers = await self._scope.enter_async_context(remote_workers(settings))
        self.encode = workers.tokenizer.encode
        self.systems = [Ours(MODE, self._loop, workers)]


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return between which two of `values` the median of more such values lies, with 95 % confidence.

    Fewer than six values have no such interval; all of them lie in what is returned then.
    """
    # The number of values below the median is binomial with one half; its deviation is sqrt(n) / 2.
    ordered, count = sorted(values), len(values)
    first = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[first], ordered[count - 1 - first]


def _processor_s(pids: Sequence[int]) -> float:
    """Return the processor seconds of this process and of others."""
    # The clock of another process, as clock_getcpuclockid(3) makes it.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _generate(side: OnLoop, pids: Sequence[int], task: Task, tracing: AbstractContextManager[None]) -> _Spent:
    """Generate, and return what it took."""
    began_s = _processor_s(pids)
    with tracing:
        result = side.systems[0].generate(task).result
        assert result is not None, "our own systems tell all"
        time.sleep(_SETTLE_S)
    return _Spent(_processor_s(pids) - began_s, result.num_rounds)


def _measure(
    sides: dict[str, tuple[OnLoop, Sequence[int], Callable[[], AbstractContextManager[None]]]],
    tasks: Sequence[Task],
    num_turns: int,
    rng: random.Random,
    tick: Callable[[], None],
) -> list[dict[str, float]]:
    """Return the milliseconds of a round on each side, turn by turn."""
    for side, pids, _ in sides.values():
        for task in tasks:
            _generate(side, pids, task, nullcontext())
    gc.freeze()  # as every command does once its models are there
    turns: list[dict[str, float]] = []
    for _ in range(num_turns):
        spent: dict[str, list[_Spent]] = {name: [] for name in sides}
        for task in tasks:
            for name in rng.sample(list(sides), len(sides)):
                side, pids, tracing = sides[name]
                spent[name].append(_generate(side, pids, task, tracing()))
        turns.append({name: _round_ms(each) for name, each in spent.items()})
        tick()
    return turns


def _round_ms(spent: Sequence[_Spent]) -> float:
    return sum(each.processor_s for each in spent) * 1e3 / sum(each.num_rounds for each in spent)


def _tasks(settings: OverheadSettings, encode: Callable[[str], Sequence[int]]) -> list[Task]:
    return [
        Task(prompt.id, tuple(encode(prompt.text)), settings.num_new_tokens)
        for prompt in load(CODE, settings.num_prompts)
    ]


def run(kind: str, settings: OverheadSettings, folder: Path, tick: Tick) -> Overhead:
    """Measure one kind; files are written below `folder`.

    Raises:
        ResourceError, LinkError: a worker ended, or cannot be reached.
    """
    rng, turns = random.Random(7), list[dict[str, float]]()

    def traced() -> AbstractContextManager[None]:
        return trace_to_file(folder / "spans.jsonl") if kind.startswith("spans") else nullcontext()

    if kind.endswith("in process"):
        with InProcess(1, [MODE], Pair()) as pair:
            sides = dict.fromkeys(("without", "control"), (pair, (), nullcontext))
            tasks = _tasks(settings, pair.encode)
            turns = _measure({**sides, "with": (pair, (), traced)}, tasks, settings.num_turns, rng, lambda: tick(kind))
    else:
        for start in range(settings.num_starts):
            place = folder / f"{start}"
            place.mkdir()
            write_certificates(place, (), timedelta(days=1))
            changed = {"traces": place} if kind.startswith("spans") else {"certificates": place}
            with ExitStack() as scope:
                opened = [Side(), Side(**changed)]
                plain, other = (scope.enter_context(side) for side in opened)
                sides = {name: (plain, plain.pids(), nullcontext) for name in ("without", "control")}
                sides["with"] = (other, other.pids(), traced)
                share = len(range(start, settings.num_turns, settings.num_starts))
                turns += _measure(sides, _tasks(settings, plain.encode), share, rng, lambda: tick(kind))
    return Overhead(*([turn[name] for turn in turns] for name in ("without", "with", "control")))


@app.command("overhead")
def main(
    kinds: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(BOUNDS),
    turns: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 40,
    starts: Annotated[int, typer.Option(min=1, help="How often workers are started.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="How many of data/code_prompts.jsonl.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=16, help="Per generation.")] = 96,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Measure what tracing and mTLS add to a round's processor time."""
    chosen = [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in chosen if kind not in BOUNDS]:
        raise InvalidRequest(f"There is no kind {unknown[0]!r}; there are {', '.join(BOUNDS)}.", param="kinds")
    report.check_output(output)
    require_worker_extra()
    console, settings = report.new_console(), OverheadSettings(turns, starts, prompts, new_tokens)
    found: dict[str, Overhead] = {}
    with report.Progress(console).running("overhead", turns * len(chosen)) as tick:
        for kind in chosen:
            with tempfile.TemporaryDirectory() as folder:
                found[kind] = run(kind, settings, Path(folder), tick)
    listed = report.table("Share of a round's processor time", "", "round, ms", "added", "95 %", "control", "bar")
    for kind, each in found.items():
        added, control = each.shares(each.with_ms), each.shares(each.control_ms)
        low, high = interval_of_median(added)
        verdict = f"{BOUNDS[kind]:.0%}: {'met' if median(added) <= BOUNDS[kind] else 'MISSED'}"
        row = (
            f"{median(each.without_ms):.2f}",
            f"{median(added):+.2%}",
            f"{low:+.1%} {high:+.1%}",
            f"{median(control):+.2%}",
            verdict,
        )
        listed.add_row(kind, *row)
    console.print(listed)
    record = {
        "benchmark": "overhead",
        "provenance": provenance(),
        "settings": asdict(settings),
        "bounds": BOUNDS,
        "kinds": {kind: {**asdict(each), "added": median(each.shares(each.with_ms))} for kind, each in found.items()},
    }
    report.emit(record, output)
