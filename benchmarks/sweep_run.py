"""`sweep`: modes over round trip, sessions at once and temperature, alternately at each point, written as measured.

One pair of workers serves all points. Rounds are outermost, so that a drift of the machine meets all points alike.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks import registry, results_file, summary, sweep_file, workloads
from benchmarks.agreement import Difference, differences
from benchmarks.alternation import ShouldStop, Tick, interrupts_between_runs, running_order
from benchmarks.environment import provenance
from benchmarks.neighbours import Neighbours
from benchmarks.peers.at_once import Batch, ServeNetwork, ServePoints
from benchmarks.peers.factories import ServedMode, ServeModes
from benchmarks.processes import Child
from benchmarks.report import Progress, show_neighbours, table
from benchmarks.results_file import Writer
from benchmarks.samples import to_record
from benchmarks.statistics import estimate, paired_speedup
from benchmarks.sweep_file import SweepFile
from benchmarks.sweep_grid import GridSettings, Point
from benchmarks.systems import Task
from benchmarks.workloads import Prompt
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidRequest, InvalidSettings
from specsplit.core.types import SamplingParams

Record = dict[str, Any]
Tell = Callable[[str], None]
_REFEREE = "the referee"


@dataclass(frozen=True, slots=True)
class Found:
    """What a sweep ended with; there is at least one whole block."""

    file: SweepFile
    summary: Record
    was_interrupted: bool


@dataclass(slots=True)
class _Bench:
    """Everything that is loaded and ready."""

    settings: GridSettings
    points: Child
    referee: Child
    tasks: list[Task]

    def at(self, point: Point) -> list[Task]:
        """Return the tasks under the temperature of `point`."""
        sampling = SamplingParams(temperature=point.temperature)
        return [Task(task.id, task.prompt_ids, task.num_tokens, sampling, task.seed) for task in self.tasks]

    def context_tokens(self) -> int:
        lengths = sorted(len(task.prompt_ids) for task in self.tasks)
        return lengths[len(lengths) // 2] + self.settings.num_new_tokens // 2


def run(settings: GridSettings, output: Path | None, progress: Progress, tell: Tell) -> Found | None:
    """Measure the grid, or go on with what `output` holds of it; None where nothing became whole.

    Raises:
        SpecSplitError: the settings do not fit each other, the models or what `output` holds, a worker is not reached,
            or `output` cannot be written.
    """
    settings.check()
    prompts = workloads.load(settings.workload, settings.num_prompts, settings.sha256)
    begun = sweep_file.read(output) if output is not None and output.is_file() and output.stat().st_size else None
    header = _header(settings, prompts)
    if begun is not None:
        _refuse_differences(begun, header)
        if begun.summary is not None:
            tell(f"{begun.path} is whole already; nothing was measured.")
            return Found(begun, begun.summary, was_interrupted=False)
        tell(
            f"Going on with {begun.path}: {len(begun.blocks)} of {begun.num_wanted} rounds at single points are whole."
        )
    with ExitStack() as scope:
        bench = _set_up(scope, settings, prompts, progress)
        header |= _facts(bench, prompts)
        if begun is not None:
            _refuse_differences(begun, header)
        found = begun or SweepFile(output or Path(), header)
        with Writer(output, found.num_kept_bytes) as writer:
            if begun is None:
                writer.add(found.header)
            return _measure(bench, found, writer, progress)


def _header(settings: GridSettings, prompts: Sequence[Prompt]) -> Record:
    origin = provenance()
    return {
        "kind": sweep_file.KIND,
        "schema": results_file.SCHEMA,
        "id": f"{origin['time']}-{secrets.token_hex(4)}",
        "benchmark": "sweep",
        "settings": settings.to_dict(),
        "provenance": origin,
        "points": [point.to_dict() for point in settings.points],
        "prompts": {"sha256": workloads.fingerprint(prompts)},
    }


def _refuse_differences(begun: SweepFile, header: Record) -> None:
    """Refuse to go on with a file of another sweep; compares what `header` knows by now."""
    pairs = [(name, begun.header["settings"].get(name), value) for name, value in header["settings"].items()]
    origins = [each["provenance"] for each in (begun.header, header)]
    pairs += [(name, *(each[name] for each in origins)) for name in ("commit", "has_uncommitted_changes", "versions")]
    pairs += [(f"machine {name}", *(each["machine"][name] for each in origins)) for name in ("cpu", "cores")]
    pairs += [("prompts", *(each["prompts"]["sha256"] for each in (begun.header, header)))]
    if "models" in header:
        pairs += [("models", begun.header["models"], header["models"])]
    told = [f"{name} was {old}, now {new}" for name, old, new in pairs if old != new]
    if told:
        raise InvalidSettings(
            f"{begun.path} holds another sweep ({'; '.join(told)}); name another --output, or the same settings."
        )


def _facts(bench: _Bench, prompts: Sequence[Prompt]) -> Record:
    """Return the part of the header that only loaded models know."""
    settings = bench.settings
    categories = {prompt.id: prompt.category for prompt in prompts}
    where = "workers elsewhere" if settings.is_remote else "one pair of local worker processes"
    told = [
        {
            "id": task.id,
            "category": categories[task.id],
            "sha256": hashlib.sha256(str(task.prompt_ids).encode()).hexdigest()[:16],
            "num_prompt_tokens": len(task.prompt_ids),
        }
        for task in bench.tasks
    ]
    return {
        "models": bench.referee.ask("models"),
        "systems": {mode: {"where": where, "mode": mode} for mode in settings.modes},
        "skipped": {},
        "prompts": {"sha256": workloads.fingerprint(prompts), "tasks": told},
    }


def _set_up(scope: ExitStack, settings: GridSettings, prompts: Sequence[Prompt], progress: Progress) -> _Bench:
    addresses = {"target": settings.target_address, "draft": settings.draft_address if settings.asks_draft else None}
    serve = ServePoints(
        settings.modes,
        settings.threads,
        max(settings.concurrencies),
        settings.pair,
        settings.shape,
        settings.lookup,
        settings.asks_draft,
        tuple((role, address) for role, address in addresses.items() if address is not None),
    )
    plain = ServeModes(settings.threads, (ServedMode(_REFEREE, registry.PLAIN),), settings.pair)
    points = scope.enter_context(Child("the workers", serve))
    referee = scope.enter_context(Child(_REFEREE, plain))
    network = scope.enter_context(Child("the network", ServeNetwork(settings.seed))) if any(settings.rtts_ms) else None
    with progress.running("loading", 2 + len(settings.points)) as tick:
        for name, child in ((_REFEREE, referee), ("workers", points)):
            child.wait_systems()
            tick(name)
        if network is not None:
            network.wait_systems()
        for number, point in enumerate(settings.points):
            points.ask("connect", number, _addresses(points.ask("addresses"), network, settings, point))
            tick(point.name)
    return _Bench(settings, points, referee, _tasks(settings, referee, prompts))


def _addresses(direct: dict[str, str], network: Child | None, settings: GridSettings, point: Point) -> dict[str, str]:
    """Return where a point reaches the workers: directly, or through a proxy with half the round trip each way."""
    slow = ("target", "draft") if settings.link == "both" else (settings.link,)
    return {
        role: network.ask("open", address, point.rtt_ms / 2e3)
        if network is not None and point.rtt_ms and role in slow
        else address
        for role, address in direct.items()
    }


def _tasks(settings: GridSettings, referee: Child, prompts: Sequence[Prompt]) -> list[Task]:
    context = referee.ask("context")
    tasks = [
        Task(prompt.id, referee.ask("encode", prompt.text), settings.num_new_tokens, seed=settings.seed)
        for prompt in prompts
    ]
    too_long = [task.id for task in tasks if len(task.prompt_ids) + task.num_tokens > context]
    if too_long:
        raise InvalidRequest(
            f"{too_long[0]} and {settings.num_new_tokens} new tokens do not fit the context of {context} tokens; take "
            "fewer --new-tokens or other prompts.",
            param="new_tokens",
        )
    return tasks


def _measure(bench: _Bench, found: SweepFile, writer: Writer, progress: Progress) -> Found | None:
    """Measure the blocks that are missing and, once all are whole, write the summary."""
    settings, points = bench.settings, bench.settings.points
    neighbours = Neighbours([bench.points.pid, bench.referee.pid, *bench.points.ask("pids")])
    per_round = sum(len(settings.batches(bench.tasks, point)) for point in points)
    rounds_left = settings.num_rounds - len(found.blocks) / len(points)
    steps = len(settings.modes) * (len(points) + round(per_round * rounds_left))
    was_interrupted = False
    with interrupts_between_runs() as should_stop, progress.running("measuring", steps) as tick:
        for number, point in enumerate(points):  # a warm-up that is not recorded
            for mode in settings.modes:
                if not should_stop():
                    bench.points.ask("batch", number, mode, settings.batches(bench.at(point), point)[0])
                tick(mode)
        for block in range(len(found.blocks), settings.num_rounds * len(points)):
            records = _block(bench, *divmod(block, len(points)), tick, should_stop)
            if records is None:
                was_interrupted = True
                break
            for record in records:
                writer.add(record)
            found.blocks.append(records)
        if not found.blocks:
            return None
        ending = _summary(bench, found, neighbours.share())
        if not was_interrupted:
            writer.add(ending)
    return Found(found, ending, was_interrupted)


def _block(bench: _Bench, number: int, place: int, tick: Tick, should_stop: ShouldStop) -> list[Record] | None:
    """Measure one round at one point; None where it was interrupted."""
    settings, point = bench.settings, bench.settings.points[place]
    records: list[Record] = []
    for batch_number, tasks in enumerate(settings.batches(bench.at(point), point)):
        for mode in running_order(settings.modes, number, batch_number):
            if should_stop():
                return None
            batch: Batch = bench.points.ask("batch", place, mode, tasks)
            samples = [
                {**to_record(number, mode, task.id, sample, task.num_tokens), "point": place}
                for task, sample in zip(tasks, batch.samples, strict=True)
            ]
            made = sum(sample["num_tokens"] for sample in samples)
            walls = {"kind": "batch", "round": number, "point": place, "system": mode, "batch": batch_number}
            records += [*samples, {**walls, "wall_s": batch.wall_s, "num_tokens": made}]
            tick(f"{mode}, {point.name}")
    if point.concurrency == 1:
        if should_stop():
            return None
        costs = bench.points.ask("costs", place, bench.context_tokens())
        for uses_draft in sorted({mode not in DRAFTLESS for mode in settings.modes}):
            asked = {"kind": "costs", "round": number, "point": place, "uses_draft": uses_draft}
            records.append({**asked, **costs[uses_draft].to_dict()})
    return records


def derive(found: SweepFile, point: int) -> Record:
    """Return what was found at a point that has at least one whole round."""
    measured = found.run(point)
    walls = {mode: found.walls(point, mode) for mode in found.header["systems"]}
    seconds = {mode: [[wall_s for wall_s, _ in row] for row in rows] for mode, rows in walls.items()}
    rates = {
        mode: [sum(tokens for _, tokens in row) / sum(wall_s for wall_s, _ in row) for row in rows]
        for mode, rows in walls.items()
    }
    plain = seconds.get(registry.PLAIN)
    return {
        "point": point,
        **found.points[point],
        "num_rounds": measured.num_rounds,
        "throughput": {mode: estimate(rates[mode]).to_dict() for mode in walls},
        "speedup": {
            mode: paired_speedup(plain, seconds[mode]).to_dict()
            for mode in walls
            if plain is not None and mode != registry.PLAIN
        },
        "systems": summary.summarise(measured),
    }


def _summary(bench: _Bench, found: SweepFile, neighbours_share: float | None) -> Record:
    measured = [place for place in range(len(found.points)) if place < len(found.blocks)]
    listed = [(place, item) for place in measured for item in _differences(bench, found, place)]
    return {
        "kind": "summary",
        "id": found.header["id"],
        "is_complete": len(found.blocks) == found.num_wanted,
        "num_rounds": found.num_rounds,
        "neighbours_share": neighbours_share,
        "points": [derive(found, place) for place in measured],
        "skipped": found.header["skipped"],
        "num_differences": len(listed),
        "num_ties": sum(item.is_tie for _, item in listed),
        "differences": [{"point": place, **item.to_dict()} for place, item in listed],
    }


def _differences(bench: _Bench, found: SweepFile, place: int) -> list[Difference]:
    measured = found.run(place)
    reference = summary.reference_of(list(measured.samples))
    if reference is None:
        return []
    rounds = [
        {name: samples[number] for name, samples in measured.samples.items()} for number in range(measured.num_rounds)
    ]
    point = bench.settings.points[place]
    sampling = SamplingParams(temperature=point.temperature)

    def margin(token_ids: Sequence[int]) -> float:
        return bench.referee.ask("top2_margin", list(token_ids), sampling, bench.settings.seed)

    return differences(bench.at(point), reference, rounds, margin)


def show(console: Console, found: Found) -> None:
    """Print a line per point and mode."""
    settings, told = found.file.header["settings"], found.summary
    inflated = " (inflated)" if settings["is_inflated"] else ""
    without_lookup = "" if settings["lookup"] else ", without lookup"
    console.print(
        f"target {settings['target']}{inflated}, draft {settings['draft']}{without_lookup}, "
        f"{settings['num_prompts']} prompts x {settings['num_new_tokens']} tokens, "
        f"{settings['threads']} threads each, round trips on: {settings['link']}",
        markup=False,
    )
    show_neighbours(console, told["neighbours_share"])
    if not told["is_complete"]:
        console.print(found.file.status, markup=False)
    listed = table(
        "Tokens per second, all sessions together", "ms", "at once", "T", "mode", "tokens/s", "over plain", "phi1"
    )
    for point in told["points"]:
        for mode, rate in point["throughput"].items():
            speedup, limits = point["speedup"].get(mode), point["systems"][mode]["limits"]
            listed.add_row(
                f"{point['rtt_ms']:g}",
                str(point["concurrency"]),
                f"{point['temperature']:g}",
                escape(mode),
                _spread(rate, 0),
                _spread(speedup, 2),
                f"{limits['phi1']['median']:.2f}" if limits else "-",
            )
    console.print(listed)
    console.print(f"Differences from plain: {told['num_differences']}, {told['num_ties']} of them ties.")


def _spread(value: Record | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"
