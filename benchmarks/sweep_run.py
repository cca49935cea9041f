"""`sweep`: modes over round trip, sessions at once and temperature, alternately at each point, written as measured.

One pair of workers serves all points. Rounds are outermost, so that a drift of the machine meets all points alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import measuring, registry, summary, workloads
from benchmarks.measuring import REFEREE, Found, Record, Tell
from benchmarks.peers.at_once import Batch, Network, Points
from benchmarks.processes import Child
from benchmarks.report.console import Progress
from benchmarks.results_file import SWEEP, ResultsFile
from benchmarks.settings import ServedMode
from benchmarks.statistics import estimate, paired_speedup
from benchmarks.sweep_grid import GridSettings, Point
from benchmarks.systems import Sample, Task
from benchmarks.workloads import Prompt
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidRequest


class _Bench(measuring.Bench):
    """One pair of workers, and connections of its own for each point; `children` may hold the network, too."""

    def __init__(self, settings: GridSettings, children: Sequence[Child], prompts: Sequence[Prompt]) -> None:
        self._settings, self._prompts, self._children = settings, prompts, children
        self._points, referee = children[:2]
        tasks, too_long = measuring.encoded(referee, prompts, settings)
        if too_long:
            raise InvalidRequest(
                f"{too_long[0]} and {settings.num_new_tokens} new tokens do not fit the context of "
                f"{referee.ask('context')} tokens; take fewer --new-tokens or other prompts.",
                param="new_tokens",
            )
        super().__init__(settings.modes, tasks, referee)

    def facts(self) -> Record:
        where = "workers elsewhere" if self._settings.is_remote else "one pair of local worker processes"
        models = self.referee.ask("models")
        told = {"workers": self._points.ask("identities", models)} if self._settings.is_remote else {}
        return {
            "models": models,
            "systems": {mode: {"where": where, "mode": mode, **told} for mode in self._settings.modes},
            "skipped": {},
            "prompts": measuring.prompt_facts(self.tasks, self._prompts),
        }

    def pids(self) -> list[int] | None:
        if self._settings.is_remote:
            return None
        return [*(child.pid for child in self._children), *self._points.ask("pids")]

    def run(self, place: int, name: str, tasks: Sequence[Task]) -> tuple[list[Sample], Record]:
        batch: Batch = self._points.ask("batch", place, name, tasks)
        return batch.samples, {"wall_s": batch.wall_s}

    def costs(self, place: int) -> list[Record]:
        found = self._points.ask("costs", place, measuring.context_tokens(self.tasks))
        kinds = sorted({mode not in DRAFTLESS for mode in self._settings.modes})
        return [{"uses_draft": uses_draft, **asdict(found[uses_draft])} for uses_draft in kinds]

    def summary(self, file: ResultsFile) -> tuple[Record, list[Record]]:
        listed: list[Record] = []
        for place in file.measured_points:
            found = measuring.differences_of(file.run(place), self.at(file.points[place]), self.referee)
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
    header["points"] = [asdict(point) for point in settings.points]
    return measuring.measure(output, header, lambda scope: _set_up(scope, settings, prompts, progress), progress, tell)


def _set_up(scope: ExitStack, settings: GridSettings, prompts: Sequence[Prompt], progress: Progress) -> _Bench:
    plain = registry.serve_modes(settings.threads, (ServedMode(REFEREE, registry.PLAIN),), settings.pair)
    points = scope.enter_context(Child("the workers", partial(Points, settings)))
    referee = scope.enter_context(Child(REFEREE, plain))
    network = scope.enter_context(Child("the network", Network)) if any(settings.rtts_ms) else None
    with progress.running("loading", 2 + len(settings.points)) as tick:
        for name, child in ((REFEREE, referee), ("workers", points)):
            child.wait_systems()
            tick(name)
        if network is not None:
            network.wait_systems()
        for number, point in enumerate(settings.points):
            points.ask("connect", number, _addresses(points.ask("addresses"), network, settings, point))
            tick(point.name)
    return _Bench(settings, [points, referee, *([network] if network else [])], prompts)


def _addresses(direct: dict[str, str], network: Child | None, settings: GridSettings, point: Point) -> dict[str, str]:
    """Return where a point reaches the workers: directly, or through a proxy with half the round trip each way."""
    slow = ("target", "draft") if settings.link == "both" else (settings.link,)
    return {
        role: network.ask("open", address, point.rtt_ms / 2e3)
        if network is not None and point.rtt_ms and role in slow
        else address
        for role, address in direct.items()
    }


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
