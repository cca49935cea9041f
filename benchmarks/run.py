"""`run`: any systems on any workload, alternately, one system per process, written down as it is measured.

Measures and writes; `summary` derives the numbers, `report` shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import measuring, registry, summary, workloads
from benchmarks.measuring import REFEREE, Found, Record, Tell
from benchmarks.processes import Child
from benchmarks.registry import Entry
from benchmarks.report.console import Progress
from benchmarks.results_file import RUN, ResultsFile
from benchmarks.settings import ServedMode, Setup
from benchmarks.systems import Sample, System, Task
from benchmarks.workloads import Prompt
from specsplit.core.errors import InvalidRequest, LinkError, MissingExtra

NUM_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class RunSettings(Setup):
    """The settings of a run; two runs of the same settings are the same measurement."""

    systems: tuple[str, ...]
    temperature: float = 0.0
    is_chat: bool = False
    measures_costs: bool = True
    """Whether each round also times the parts of a round, for the limits."""

    def to_dict(self) -> Record:
        """Return the settings in JSON types."""
        own = {"temperature": self.temperature, "chat": self.is_chat, "num_warm_up_prompts": NUM_WARM_UPS}
        return {"systems": list(self.systems), **own, **Setup.to_dict(self)}


def run(settings: RunSettings, output: Path | None, progress: Progress, tell: Tell) -> Found | None:
    """Measure, or go on with the run that `output` holds; None if no round became whole.

    Raises:
        SpecSplitError: the settings do not fit each other, the models or the content of `output`; nothing can be
            measured; or `output` cannot be written.
    """
    entries = find_entries(settings)
    prompts = workloads.load(settings.workload, settings.num_prompts, settings.sha256)

    def ready(scope: ExitStack) -> Bench:
        bench = set_up(scope, settings, entries, prompts, progress)
        for line in _remarks(bench):
            tell(line)
        return bench

    header = measuring.new_header(RUN, settings.to_dict(), prompts)
    return measuring.measure(output, header, ready, progress, tell)


def _remarks(bench: Bench) -> list[str]:
    """Return what a reader has to know of systems and prompts that are missing or special."""
    told = [f"Skipped {name}: {why}" for name, why in bench.skipped.items()]
    tokens = bench.settings.num_new_tokens
    told += [f"Left out {name}: its prompt and {tokens} tokens do not fit the context." for name in bench.left_out]
    return told + [line for each in bench.entries for line in summary.reservations(each.name, bench.dialect(each))]


def find_entries(settings: RunSettings) -> list[Entry]:
    """Return the systems of the settings.

    Raises:
        InvalidRequest: none is named, one is named twice, or one cannot be measured.
    """
    if not settings.systems:
        raise InvalidRequest("Name at least one system with --systems.", param="systems")
    if len(set(settings.systems)) < len(settings.systems):
        raise InvalidRequest("A system is named twice in --systems; name each once.", param="systems")
    return [registry.find(name, settings) for name in settings.systems]


class Bench(measuring.Bench):
    """A process per system."""

    num_warm_ups = NUM_WARM_UPS

    def __init__(self, settings: RunSettings, prompts: Sequence[Prompt], referee: Child) -> None:
        super().__init__([], [], referee)
        self.settings, self.prompts = settings, prompts
        self.entries: list[Entry] = []
        self.children: dict[str, Child] = {}
        self.systems: dict[str, System] = {}
        self.skipped: dict[str, str] = {}
        self.left_out: list[str] = []

    def facts(self) -> Record:
        return {
            "models": self.referee.ask("models"),
            "systems": {entry.name: self._facts(entry) for entry in self.entries},
            "skipped": self.skipped,
            "left_out": self.left_out,
            "prefill_chunk_tokens": self.referee.ask("prefill_chunk_tokens"),
            "prompts": measuring.prompt_facts(self.tasks, self.prompts),
        }

    def _facts(self, entry: Entry) -> Record:
        has_costs = entry.is_ours and self.settings.measures_costs
        place = registry.facts_of_place(entry.name, self.settings)
        if entry.name.endswith("@remote"):
            place = {"workers": self.children[entry.name].ask("identities", self.referee.ask("models"))}
        return {**entry.to_dict(), "has_costs": has_costs, **place, **self.dialect(entry)}

    def dialect(self, entry: Entry) -> Record:
        """Return how a server is asked; nothing for any other system."""
        return self.children[entry.name].ask("dialect") if entry.is_server else {}

    def pids(self) -> list[int] | None:
        if any(entry.is_server or entry.name.endswith("@remote") for entry in self.entries):
            return None
        serving = [entry for entry in self.entries if entry.is_ours and "@" in entry.name]
        workers = [pid for entry in serving for pid in self.children[entry.name].ask("pids")]
        return [*(child.pid for child in {*self.children.values(), self.referee}), *workers]

    def run(self, place: int, name: str, tasks: Sequence[Task]) -> tuple[list[Sample], Record]:
        return [self.systems[name].generate(task) for task in tasks], {}

    def costs(self, place: int) -> list[Record]:
        context_tokens = measuring.context_tokens(self.tasks)
        asked = [entry.name for entry in self.entries if entry.is_ours and self.settings.measures_costs]
        return [{"system": name, **asdict(self.children[name].ask("costs", context_tokens))} for name in asked]

    def summary(self, file: ResultsFile) -> tuple[Record, list[Record]]:
        measured = file.run()
        listed = measuring.differences_of(measured, self.at(file.points[0]), self.referee)
        return {"systems": summary.summarise(measured)}, [item.to_dict() for item in listed]


def set_up(
    scope: ExitStack, settings: RunSettings, entries: Sequence[Entry], prompts: Sequence[Prompt], progress: Progress
) -> Bench:
    """Start a process per system, all at once, and encode the prompts; a system that is not there is skipped."""
    children = {entry.name: scope.enter_context(Child(entry.name, entry.make(settings))) for entry in entries}
    # A system in this process's own kind of child has the target loaded: it is the referee as well.
    in_process = next((entry.name for entry in entries if entry.is_ours and "@" not in entry.name), None)
    alone = registry.serve_modes(settings.threads, (ServedMode(REFEREE, registry.PLAIN),), settings.pair)
    referee = children[in_process] if in_process else scope.enter_context(Child(REFEREE, alone))
    bench = Bench(settings, prompts, referee)
    bench.children = children
    with progress.running("loading", len(children) + (in_process is None)) as tick:
        if in_process is None:
            referee.wait_systems()
            tick(REFEREE)
        for entry in entries:
            _wait(bench, entry)
            tick(entry.name)
    if not bench.systems:
        raise InvalidRequest(f"Nothing can be measured: {' '.join(f'{n}: {why}' for n, why in bench.skipped.items())}")
    bench.names = list(bench.systems)
    bench.tasks, bench.left_out = measuring.encoded(referee, prompts, settings, is_chat=settings.is_chat)
    if not bench.tasks:
        context = referee.ask("context")
        raise InvalidRequest(f"No prompt fits the context of {context} tokens with its new tokens.", param="prompts")
    return bench


def _wait(bench: Bench, entry: Entry) -> None:
    try:
        (bench.systems[entry.name],) = bench.children[entry.name].wait_systems()
        bench.entries.append(entry)
    except (MissingExtra, LinkError) as error:
        bench.skipped[entry.name] = str(error)
        del bench.children[entry.name]
