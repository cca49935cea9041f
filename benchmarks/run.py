"""`run`: any systems on any workload, alternately, one system per process, written down as it is measured.

Measures and writes; `summary` derives the numbers, `report` shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import measuring, registry, summary, workloads
from benchmarks.alternation import ShouldStop, Tick, run_round
from benchmarks.measuring import REFEREE, Control, Found, Record, Tell
from benchmarks.peers.factories import ServedMode, serve_modes
from benchmarks.processes import Child
from benchmarks.registry import Entry
from benchmarks.report.console import Progress
from benchmarks.results_file import RUN, ResultsFile
from benchmarks.samples import to_record
from benchmarks.settings import Setup
from benchmarks.systems import Sample, System, Task
from benchmarks.workloads import Prompt
from specsplit.core.errors import InvalidRequest, LinkError, MissingExtra
from specsplit.core.types import SamplingParams

NUM_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class RunSettings(Setup):
    """The settings of a run; two runs of the same settings are the same measurement."""

    systems: tuple[str, ...]
    temperature: float = 0.0
    is_chat: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature)

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
    entries = _entries(settings)
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


def _entries(settings: RunSettings) -> list[Entry]:
    if not settings.systems:
        raise InvalidRequest("Name at least one system with --systems.", param="systems")
    if len(set(settings.systems)) < len(settings.systems):
        raise InvalidRequest("A system is named twice in --systems; name each once.", param="systems")
    return [registry.find(name, settings) for name in settings.systems]


@dataclass(slots=True)
class Bench:
    """Everything that is loaded and ready."""

    settings: RunSettings
    entries: list[Entry]
    children: dict[str, Child]
    systems: list[System]
    skipped: dict[str, str]
    referee: Child
    prompts: Sequence[Prompt] = ()
    tasks: list[Task] = field(default_factory=list[Task])
    left_out: list[str] = field(default_factory=list[str])

    def facts(self) -> Record:
        return {
            "models": self.referee.ask("models"),
            "systems": {entry.name: {**entry.to_dict(), **self.dialect(entry)} for entry in self.entries},
            "skipped": self.skipped,
            "left_out": self.left_out,
            "prefill_chunk_tokens": self.referee.ask("prefill_chunk_tokens"),
            "prompts": measuring.prompt_facts(self.tasks, self.prompts),
        }

    def dialect(self, entry: Entry) -> Record:
        """Return how a server is asked; nothing for any other system."""
        return self.children[entry.name].ask("dialect") if entry.is_server else {}

    def pids(self) -> list[int]:
        serving = [entry for entry in self.entries if entry.is_ours and "@" in entry.name]
        workers = [pid for entry in serving for pid in self.children[entry.name].ask("pids")]
        return [*(child.pid for child in {*self.children.values(), self.referee}), *workers]

    def num_steps(self, file: ResultsFile) -> int:
        num_tasks = len(self.tasks[:NUM_WARM_UPS]) + (file.num_wanted - file.num_rounds) * len(self.tasks)
        return len(self.systems) * num_tasks

    def warm_up(self, tick: Tick, should_stop: ShouldStop) -> None:
        run_round(self.systems, self.tasks[:NUM_WARM_UPS], 0, tick, should_stop)

    def block(self, number: int, place: int, control: Control) -> list[Record] | None:
        records: list[Record] = []

        def keep(record: Record) -> None:
            control.write(record)
            records.append(record)

        def record(system: str, task: Task, sample: Sample) -> None:
            keep(to_record(number, system, task.id, sample, task.num_tokens))

        if run_round(self.systems, self.tasks, number, control.tick, control.should_stop, record) is None:
            return None
        for entry in self.entries:
            if entry.has_costs:
                if control.should_stop():
                    return None
                costs = self.children[entry.name].ask("costs", measuring.context_tokens(self.tasks))
                keep({"kind": "costs", "round": number, "system": entry.name, **asdict(costs)})
        return records

    def summary(self, file: ResultsFile) -> tuple[Record, list[Record]]:
        measured = file.run()
        listed = [item.to_dict() for item in measuring.differences_of(measured, self.tasks, self.referee)]
        return {"systems": summary.summarise(measured)}, listed


def set_up(
    scope: ExitStack, settings: RunSettings, entries: Sequence[Entry], prompts: Sequence[Prompt], progress: Progress
) -> Bench:
    """Start a process per system, all at once, and encode the prompts; a system that is not there is skipped."""
    missing = {entry.name: entry.missing_package() for entry in entries}
    skipped = {name: f"the package {package} is not installed." for name, package in missing.items() if package}
    children = {
        entry.name: scope.enter_context(Child(entry.name, entry.make(settings)))
        for entry in entries
        if entry.name not in skipped
    }
    # A system in this process's own kind of child has the target loaded: it is the referee as well.
    in_process = next((entry.name for entry in entries if entry.is_ours and "@" not in entry.name), None)
    alone = serve_modes(settings.threads, (ServedMode(REFEREE, registry.PLAIN),), settings.pair)
    referee = children[in_process] if in_process else scope.enter_context(Child(REFEREE, alone))
    bench = Bench(settings, [], children, [], skipped, referee, prompts)
    with progress.running("loading", len(children) + (in_process is None)) as tick:
        if in_process is None:
            referee.wait_systems()
            tick(REFEREE)
        for entry in entries:
            if entry.name not in skipped:
                _wait(bench, entry)
                tick(entry.name)
    if not bench.systems:
        raise InvalidRequest(f"Nothing can be measured: {' '.join(f'{n}: {why}' for n, why in skipped.items())}")
    _encode(bench)
    return bench


def _wait(bench: Bench, entry: Entry) -> None:
    try:
        bench.systems += bench.children[entry.name].wait_systems()
        bench.entries.append(entry)
    except (MissingExtra, LinkError) as error:
        bench.skipped[entry.name] = str(error)
        del bench.children[entry.name]


def _encode(bench: Bench) -> None:
    settings, context = bench.settings, bench.referee.ask("context")
    for prompt in bench.prompts:
        prompt_ids = bench.referee.ask("encode", prompt.text, settings.is_chat)
        if len(prompt_ids) + settings.num_new_tokens > context:
            bench.left_out.append(prompt.id)
        else:
            text = None if settings.is_chat else prompt.text
            task = Task(prompt.id, prompt_ids, settings.num_new_tokens, settings.sampling, settings.seed, text)
            bench.tasks.append(task)
    if not bench.tasks:
        raise InvalidRequest(f"No prompt fits the context of {context} tokens with its new tokens.", param="prompts")
