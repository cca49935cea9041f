"""`load`: every system under the same loads in turn, each in a process of its own, and the line that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, cycle
from typing import Any

from benchmarks import measuring, registry, workloads
from benchmarks.environment import Neighbours, provenance
from benchmarks.load import figures
from benchmarks.load.clients import ClosedLoop, Load, OpenLoop, Outcome
from benchmarks.load.settings import ENDPOINT, GENERATE, LoadSettings
from benchmarks.measuring import REFEREE, Tick, running_order
from benchmarks.processes import Child, Factory
from benchmarks.report.console import Progress
from benchmarks.settings import ServedMode
from benchmarks.systems import Task
from benchmarks.workloads import Prompt
from specsplit.core.errors import InvalidRequest, SpecSplitError
from specsplit.core.types import SamplingParams

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """One load at one temperature: a closed loop of so many clients, or, with None, the open loop."""

    temperature: float
    clients: int | None


Round = dict[tuple[Point, str], list[Outcome]]
Measured = dict[tuple[Point, str], list[list[Outcome]]]
"""The outcomes of whole rounds by point and system."""


class Bench:
    """The processes of the systems, and the tasks."""

    def __init__(self, settings: LoadSettings, scope: ExitStack, prompts: Sequence[Prompt], progress: Progress) -> None:
        self._settings = settings
        self._children = {name: scope.enter_context(Child(name, _factory(name, settings))) for name in settings.systems}
        plain = registry.serve_modes(settings.threads, (ServedMode(REFEREE, registry.PLAIN),), settings.pair)
        # A server alone gets the prompts as texts, whatever its tokens are.
        referee = scope.enter_context(Child(REFEREE, plain)) if settings.systems != (ENDPOINT,) else None
        with progress.running("loading", len(self._children)) as tick:
            for name, child in self._children.items():
                child.wait_systems()
                tick(name)
        self.systems = {name: registry.facts_of_place(name, settings) for name in settings.systems}
        self.models: Record = {}
        tasks = [Task(prompt.id, (), settings.num_new_tokens, text=prompt.text) for prompt in prompts]
        if referee is not None:
            referee.wait_systems()
            self.models = referee.ask("models")
            tasks, left_out = measuring.encoded(referee, prompts, settings)
            if left_out:
                raise InvalidRequest(f"{left_out[0]} and its new tokens do not fit the context.", param="new_tokens")
        for name in (name for name in settings.systems if name.endswith("@remote")):
            self.systems[name] = {"workers": self._children[name].ask("identities", self.models)}
        if ENDPOINT in self._children:
            self.systems[ENDPOINT] = self._children[ENDPOINT].ask("dialect")
        self._tasks = tasks
        workers = [child.ask("pids") for name, child in self._children.items() if "@" in name]
        self.pids = [*(child.pid for child in self._children.values()), *chain(*workers)]

    @property
    def points(self) -> list[Point]:
        """Return the loads of a round; an open loop comes after the closed ones that tell what is too much."""
        settings = self._settings
        loads = (*settings.clients, *((None,) if settings.rate or settings.overload else ()))
        return [Point(temperature, clients) for temperature in settings.temperatures for clients in loads]

    def names(self, point: Point) -> list[str]:
        """Return the systems that take the load."""
        return [name for name in self._settings.systems if point.clients is not None or name != GENERATE]

    def tasks(self, point: Point) -> list[Task]:
        """Return the requests of a load: prompts and lengths in turn, another seed whenever a prompt comes again."""
        settings, tasks, sampling = self._settings, self._tasks, SamplingParams(temperature=point.temperature)
        num_tasks = settings.num_arrivals if point.clients is None else settings.num_requests
        seeds = (settings.seed + number // len(tasks) for number in range(num_tasks))
        return [
            replace(task, num_tokens=length, sampling=sampling, seed=seed)
            for seed, task, length in zip(seeds, cycle(tasks), cycle(settings.lengths), strict=False)
        ]

    def warm_up(self) -> dict[str, str]:
        """Have every system do a request for each client of the greatest load; return an error of each that failed."""
        most = max(self._settings.clients)
        tasks = self.tasks(self.points[0])[:most]
        ended = {name: child.ask("drive", ClosedLoop(most), tasks) for name, child in self._children.items()}
        return {name: each.error for name, outcomes in ended.items() for each in outcomes if each.error is not None}

    def round(self, number: int, tick: Tick, should_stop: Callable[[], bool]) -> Round | None:
        """Put every load on every system; None if it was interrupted."""
        found: Round = {}
        for place, point in enumerate(self.points):
            for name in running_order(self.names(point), number, place):
                if should_stop():
                    return None
                load = self._load(point, name, found)
                found[point, name] = self._children[name].ask("drive", load, self.tasks(point))
                tick(name)
        return found

    def _load(self, point: Point, name: str, found: Round) -> Load:
        settings = self._settings
        if point.clients is not None:
            return ClosedLoop(point.clients)
        closed = [found[Point(point.temperature, clients), name] for clients in settings.clients]
        most = max(figures.rates(each, settings.limits)["requests_per_s"] for each in closed)
        return OpenLoop(settings.rate or (settings.overload or 1) * most, settings.seed)


def run(settings: LoadSettings, progress: Progress) -> Record | None:
    """Measure and return the line: the whole rounds, and the error if one ended them; None if it has no whole round.

    Raises:
        SpecSplitError: the settings do not fit each other or the models, or something failed before a round was whole.
    """
    settings.check()
    prompts = workloads.load(settings.workload, settings.num_prompts, settings.sha256)
    rounds: list[Round] = []
    error: str | None = None
    origin = provenance()
    with ExitStack() as scope:
        bench = Bench(settings, scope, prompts, progress)
        loads = sum(len(bench.names(point)) for point in bench.points)
        should_stop = scope.enter_context(measuring.interrupts_between_runs())
        tick = scope.enter_context(progress.running("measuring", settings.num_rounds * loads))
        warm_up_errors = bench.warm_up()
        neighbours = Neighbours(bench.pids)
        try:
            while len(rounds) < settings.num_rounds and (found := bench.round(len(rounds), tick, should_stop)):
                rounds.append(found)
        except SpecSplitError as failure:
            if not rounds:
                raise
            error = str(failure)
        # What computes for us in processes that we did not start is no neighbour, and nobody knows which they are.
        is_known = settings.endpoint is None and not any(name.endswith("@remote") for name in settings.systems)
        share = neighbours.share() if is_known else None
    if not rounds:
        return None
    measured = {key: [each[key] for each in rounds] for key in rounds[0]}
    return {
        "benchmark": "load",
        "provenance": origin,
        "models": bench.models,
        "systems": bench.systems,
        "settings": settings.to_dict(),
        "prompts": {"sha256": workloads.fingerprint(prompts)},
        "is_complete": len(rounds) == settings.num_rounds,
        "error": error,
        "warm_up_errors": warm_up_errors,
        "num_rounds": len(rounds),
        "neighbours_share": share,
        "points": points_of(measured, settings),
    }


def points_of(measured: Measured, settings: LoadSettings) -> list[Record]:
    """Return the figures of every point: by system its own, over generate, over the fewest clients, over its peak."""
    listed: list[Record] = []
    whole = {key: figures.summarise(rounds, settings.limits) for key, rounds in measured.items()}
    for point in dict.fromkeys(point for point, _ in measured):
        own = {name: whole[point, name] for name in settings.systems if (point, name) in whole}
        closed = [Point(point.temperature, clients) for clients in settings.clients]
        for name, system in own.items():
            if GENERATE in own and name != GENERATE:
                system["over_generate"] = figures.ratio(system, own[GENERATE])
            if name == ENDPOINT and len(own) > 1:
                system["over_direct"] = figures.ratio(system, next(iter(own.values())))
            fewest = Point(point.temperature, min(settings.clients))
            system["over_fewest_clients"] = figures.ratio(system, whole[fewest, name])
            if point.clients is None:
                peak = max((whole[each, name] for each in closed), key=lambda each: each["tokens_per_s"]["median"])
                system["over_peak"] = figures.ratio(system, peak)
        expected = _reference(measured, point.temperature)
        # With a temperature generate draws other random numbers than we do.
        comparable = [name for name in own if point.temperature == 0 or name != GENERATE]
        texts = {name: figures.differing_texts(measured[point, name], expected) for name in comparable}
        samples = {name: [list(map(figures.raw, each)) for each in measured[point, name]] for name in own}
        listed.append({**asdict(point), "systems": own, "texts": texts, "samples": samples})
    return listed


def _reference(measured: Measured, temperature: float) -> dict[int, tuple[int, ...]]:
    """Return the texts of plain decoding, or else of the first mode, by task: those of its first round at any load."""
    names = [name for point, name in measured if point.temperature == temperature and name not in (GENERATE, ENDPOINT)]
    chosen = next((name for name in names if name.startswith(registry.PLAIN)), next(iter(names), None))
    of_chosen = [each for (point, name), each in measured.items() if (name, point.temperature) == (chosen, temperature)]
    first = [each for rounds in reversed(of_chosen) for each in rounds[0]]
    return {each.number: each.token_ids for each in first if each.token_ids is not None}


def _factory(name: str, settings: LoadSettings) -> Factory:
    if name == ENDPOINT:
        return partial(registry.open_alone, "benchmarks.peers.openai_completions:LoadedEndpoint", settings.endpoint)
    mode = registry.find(name, settings).mode
    if mode is None:
        return registry.serve_alone("benchmarks.peers.transformers_ways:BatchedGenerate", name, settings)
    kind = "ours_remote:LoadedServices" if "@" in name else "ours:LoadedEngines"
    chosen = registry.served_mode(name, mode, settings)
    return partial(registry.open_served, f"benchmarks.peers.{kind}", chosen, settings)
