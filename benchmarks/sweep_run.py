"""`sweep`: modes over round trip, sessions at once and temperature, alternately at each point, written as measured.

One pair of workers serves all points. Rounds are outermost, so that a drift of the machine meets all points alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import measuring, registry, summary, workloads
from benchmarks.alternation import ShouldStop, Tick, interrupts_between_runs, running_order
from benchmarks.measuring import REFEREE, Found, Record, Tell
from benchmarks.neighbours import Neighbours
from benchmarks.peers.at_once import Batch, Network, Points, PointsSetup
from benchmarks.peers.factories import serve_modes
from benchmarks.peers.modes import ServedMode
from benchmarks.processes import Child
from benchmarks.report.console import Progress
from benchmarks.results_file import SWEEP, ResultsFile, Writer
from benchmarks.samples import to_record
from benchmarks.statistics import estimate, paired_speedup
from benchmarks.sweep_grid import GridSettings, Point
from benchmarks.systems import Task
from benchmarks.workloads import Prompt
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import SamplingParams


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


def run(settings: GridSettings, output: Path | None, progress: Progress, tell: Tell) -> Found | None:
    """Measure the grid, or go on with what `output` holds of it; None where nothing became whole.

    Raises:
        SpecSplitError: the settings do not fit each other, the models or what `output` holds, a worker is not reached,
            or `output` cannot be written.
    """
    settings.check()
    prompts = workloads.load(settings.workload, settings.num_prompts, settings.sha256)
    header = measuring.new_header(SWEEP, settings.to_dict(), prompts)
    header["points"] = [point.to_dict() for point in settings.points]
    begun = measuring.begun(output, header, tell)
    if begun is not None and begun.summary is not None:
        return Found(begun, begun.summary, was_interrupted=False)
    with ExitStack() as scope:
        bench = _set_up(scope, settings, prompts, progress)
        header |= _facts(bench, prompts)
        if begun is not None:
            measuring.refuse_differences(begun, header)
        file = begun or ResultsFile(output or Path("this measurement"), header)
        with Writer(output, file.num_kept_bytes) as writer:
            if begun is None:
                writer.add(header)
            return _measure(bench, file, writer, progress)


def _facts(bench: _Bench, prompts: Sequence[Prompt]) -> Record:
    """Return the part of the header that only loaded models know."""
    settings = bench.settings
    where = "workers elsewhere" if settings.is_remote else "one pair of local worker processes"
    return {
        "models": bench.referee.ask("models"),
        "systems": {mode: {"where": where, "mode": mode} for mode in settings.modes},
        "skipped": {},
        "prompts": measuring.prompt_facts(bench.tasks, prompts),
    }


def _set_up(scope: ExitStack, settings: GridSettings, prompts: Sequence[Prompt], progress: Progress) -> _Bench:
    addresses = {"target": settings.target_address, "draft": settings.draft_address if settings.asks_draft else None}
    setup = PointsSetup(
        settings.modes,
        settings.threads,
        max(settings.concurrencies),
        settings.pair,
        settings.shape,
        settings.lookup,
        settings.asks_draft,
        tuple((role, address) for role, address in addresses.items() if address is not None),
    )
    plain = serve_modes(settings.threads, (ServedMode(REFEREE, registry.PLAIN),), settings.pair)
    points = scope.enter_context(Child("the workers", partial(Points, setup)))
    referee = scope.enter_context(Child(REFEREE, plain))
    network = (
        scope.enter_context(Child("the network", partial(Network, settings.seed))) if any(settings.rtts_ms) else None
    )
    with progress.running("loading", 2 + len(settings.points)) as tick:
        for name, child in ((REFEREE, referee), ("workers", points)):
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


def _measure(bench: _Bench, file: ResultsFile, writer: Writer, progress: Progress) -> Found | None:
    """Measure the blocks that are missing and, once all are whole, write the summary."""
    settings, points = bench.settings, bench.settings.points
    neighbours = Neighbours([bench.points.pid, bench.referee.pid, *bench.points.ask("pids")])
    per_round = sum(len(settings.batches(bench.tasks, point)) for point in points)
    rounds_left = settings.num_rounds - len(file.blocks) / len(points)
    steps = len(settings.modes) * (len(points) + round(per_round * rounds_left))
    was_interrupted = False
    with interrupts_between_runs() as should_stop, progress.running("measuring", steps) as tick:
        for number, point in enumerate(points):  # a warm-up that is not recorded
            for mode in settings.modes:
                if not should_stop():
                    bench.points.ask("batch", number, mode, settings.batches(bench.at(point), point)[0])
                tick(mode)
        for block in range(len(file.blocks), settings.num_rounds * len(points)):
            records = _block(bench, *divmod(block, len(points)), tick, should_stop)
            if records is None:
                was_interrupted = True
                break
            writer.add_all(records)
            file.blocks.append(records)
        if not file.blocks:
            return None
        last = _summary(bench, file, neighbours.share())
        if not was_interrupted:
            writer.add(last)
    return Found(file, last, was_interrupted)


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
        costs = bench.points.ask("costs", place, measuring.context_tokens(bench.tasks))
        for uses_draft in sorted({mode not in DRAFTLESS for mode in settings.modes}):
            asked = {"kind": "costs", "round": number, "point": place, "uses_draft": uses_draft}
            records.append({**asked, **costs[uses_draft].to_dict()})
    return records


def derive(file: ResultsFile, point: int) -> Record:
    """Return the numbers of a point that has at least one whole round."""
    measured = file.run(point)
    walls = {mode: file.walls(point, mode) for mode in file.header["systems"]}
    seconds = {mode: [[wall_s for wall_s, _ in row] for row in rows] for mode, rows in walls.items()}
    rates = {
        mode: [sum(tokens for _, tokens in row) / sum(wall_s for wall_s, _ in row) for row in rows]
        for mode, rows in walls.items()
    }
    plain = seconds.get(registry.PLAIN)
    return {
        "point": point,
        **file.points[point],
        "num_rounds": measured.num_rounds,
        "throughput": {mode: estimate(rates[mode]).to_dict() for mode in walls},
        "speedup": {
            mode: paired_speedup(plain, seconds[mode]).to_dict()
            for mode in walls
            if plain is not None and mode != registry.PLAIN
        },
        "systems": summary.summarise(measured),
    }


def _summary(bench: _Bench, file: ResultsFile, neighbours_share: float | None) -> Record:
    listed: list[Record] = []
    for place in file.measured_points:
        tasks = bench.at(bench.settings.points[place])
        found = measuring.differences_of(file.run(place), tasks, bench.referee)
        listed += [{"point": place, **item.to_dict()} for item in found]
    points = [derive(file, place) for place in file.measured_points]
    return measuring.ending(file, {"points": points}, listed, neighbours_share)
