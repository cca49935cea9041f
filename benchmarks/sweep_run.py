"""`sweep`: modes over round trip, sessions at once and temperature, alternately at each point, written as measured.

One pair of workers serves all points. Rounds are outermost, so that a drift of the machine meets all points alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import measuring, registry, summary, workloads
from benchmarks.alternation import ShouldStop, Tick, running_order
from benchmarks.measuring import REFEREE, Control, Found, Record, Tell
from benchmarks.peers.at_once import Batch, Network, Points, PointsSetup
from benchmarks.peers.factories import serve_modes
from benchmarks.peers.modes import ServedMode
from benchmarks.processes import Child
from benchmarks.report.console import Progress
from benchmarks.results_file import SWEEP, ResultsFile
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
    prompts: Sequence[Prompt]

    def at(self, point: Point) -> list[Task]:
        """Return the tasks under the temperature of `point`."""
        return [replace(task, sampling=SamplingParams(temperature=point.temperature)) for task in self.tasks]

    def facts(self) -> Record:
        where = "workers elsewhere" if self.settings.is_remote else "one pair of local worker processes"
        return {
            "models": self.referee.ask("models"),
            "systems": {mode: {"where": where, "mode": mode} for mode in self.settings.modes},
            "skipped": {},
            "prompts": measuring.prompt_facts(self.tasks, self.prompts),
        }

    def pids(self) -> list[int]:
        return [self.points.pid, self.referee.pid, *self.points.ask("pids")]

    def num_steps(self, file: ResultsFile) -> int:
        points = self.settings.points
        per_round = sum(len(self.settings.batches(self.tasks, point)) for point in points)
        rounds_left = self.settings.num_rounds - len(file.blocks) / len(points)
        return len(self.settings.modes) * (len(points) + round(per_round * rounds_left))

    def warm_up(self, tick: Tick, should_stop: ShouldStop) -> None:
        for number, point in enumerate(self.settings.points):
            for mode in self.settings.modes:
                if not should_stop():
                    self.points.ask("batch", number, mode, self.settings.batches(self.at(point), point)[0])
                tick(mode)

    def block(self, number: int, place: int, control: Control) -> list[Record] | None:
        settings, point = self.settings, self.settings.points[place]
        records: list[Record] = []
        for batch_number, tasks in enumerate(settings.batches(self.at(point), point)):
            for mode in running_order(settings.modes, number, batch_number):
                if control.should_stop():
                    return None
                batch: Batch = self.points.ask("batch", place, mode, tasks)
                samples = [
                    {**to_record(number, mode, task.id, sample, task.num_tokens), "point": place}
                    for task, sample in zip(tasks, batch.samples, strict=True)
                ]
                made = sum(sample["num_tokens"] for sample in samples)
                walls = {"kind": "batch", "round": number, "point": place, "system": mode, "batch": batch_number}
                records += [*samples, {**walls, "wall_s": batch.wall_s, "num_tokens": made}]
                control.tick(f"{mode}, {point.name}")
        if point.concurrency == 1:
            if control.should_stop():
                return None
            costs = self.points.ask("costs", place, measuring.context_tokens(self.tasks))
            for uses_draft in sorted({mode not in DRAFTLESS for mode in settings.modes}):
                asked = {"kind": "costs", "round": number, "point": place, "uses_draft": uses_draft}
                records.append({**asked, **asdict(costs[uses_draft])})
        for record in records:
            control.write(record)
        return records

    def summary(self, file: ResultsFile) -> tuple[Record, list[Record]]:
        listed: list[Record] = []
        for place in file.measured_points:
            tasks = self.at(self.settings.points[place])
            found = measuring.differences_of(file.run(place), tasks, self.referee)
            listed += [{"point": place, **item.to_dict()} for item in found]
        return {"points": [derive(file, place) for place in file.measured_points]}, listed


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
    return measuring.measure(output, header, lambda scope: _set_up(scope, settings, prompts, progress), progress, tell)


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
    return _Bench(settings, points, referee, _tasks(settings, referee, prompts), prompts)


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
