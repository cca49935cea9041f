"""`run`: any systems on any workload, alternately, one system per process, written down as it is measured.

Measures and writes; what the numbers say is `summary`'s business, how they look `run_report`'s.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import registry, results_file, summary, workloads
from benchmarks.agreement import Difference, differences
from benchmarks.alternation import ShouldStop, Tick, interrupts_between_runs, run_round
from benchmarks.environment import provenance
from benchmarks.neighbours import Neighbours
from benchmarks.pair import Pair, is_inflated
from benchmarks.peers.factories import ServedMode, ServeModes, Shape
from benchmarks.processes import Child
from benchmarks.registry import Entry, Setup
from benchmarks.report import Progress
from benchmarks.results_file import RunFile, Writer
from benchmarks.samples import to_record
from benchmarks.statistics import BOOTSTRAP_SEED, CONFIDENCE
from benchmarks.systems import Sample, System, Task
from benchmarks.workloads import Prompt
from specsplit.core.errors import InvalidRequest, InvalidSettings, LinkError, MissingExtra
from specsplit.core.types import SamplingParams

NUM_WARM_UPS = 2
_REFEREE = "the referee"
Record = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What is run; two runs of the same settings are the same measurement."""

    systems: tuple[str, ...]
    workload: str = workloads.CODE
    sha256: str | None = None
    num_prompts: int | None = 6
    num_new_tokens: int = 96
    num_rounds: int = 5
    threads: int = 2
    temperature: float = 0.0
    seed: int = 0
    is_chat: bool = False
    is_inflated: bool = False
    """Whether to say so of a target that does not tell it itself."""
    pair: Pair = field(default=Pair())
    shape: Shape = field(default=Shape())
    lookup: bool = True
    """Of our systems: whether trees hold lookup's nodes too."""
    target_address: str | None = None
    draft_address: str | None = None

    @property
    def setup(self) -> Setup:
        """Return what every system is made from."""
        return Setup(self.pair, self.threads, self.shape, self.lookup, self.target_address, self.draft_address)

    def to_dict(self) -> Record:
        """Return the settings in JSON types."""
        return {
            "systems": list(self.systems),
            "workload": self.workload,
            "num_prompts": self.num_prompts,
            "num_new_tokens": self.num_new_tokens,
            "num_rounds": self.num_rounds,
            "num_warm_up_prompts": NUM_WARM_UPS,
            "threads": self.threads,
            "temperature": self.temperature,
            "seed": self.seed,
            "chat": self.is_chat,
            "target": self.pair.target,
            "draft": self.pair.draft,
            "is_inflated": self.is_inflated or is_inflated(self.pair.target),
            "dtype": self.pair.dtype,
            "device": self.pair.device,
            "nodes": self.shape.nodes,
            "depth": self.shape.depth,
            "branching": self.shape.branching,
            "lookup": self.lookup,
            "target_address": self.target_address,
            "draft_address": self.draft_address,
            "bootstrap_seed": BOOTSTRAP_SEED,
            "confidence": CONFIDENCE,
        }


@dataclass(frozen=True, slots=True)
class Found:
    """What a run ended with."""

    run: RunFile
    """Whole rounds only; there is at least one."""
    summary: Record
    was_interrupted: bool


def run(settings: RunSettings, output: Path | None, progress: Progress, tell: Tell) -> Found | None:
    """Measure, or go on with what `output` holds of the same run; None where no round became whole.

    Raises:
        SpecSplitError: the settings do not fit each other, the models or what `output` holds; nothing can be measured;
            or `output` cannot be written.
    """
    entries = _entries(settings)
    prompts = workloads.load(settings.workload, settings.num_prompts, settings.sha256)
    begun = results_file.read(output) if output is not None and output.is_file() and output.stat().st_size else None
    header = _header(settings, prompts)
    if begun is not None:
        _refuse_differences(begun, header)
        if begun.summary is not None:
            tell(f"{begun.path} is whole already; nothing was measured.")
            return Found(begun, begun.summary, was_interrupted=False)
        tell(f"Going on with {begun.path}: {begun.num_rounds} of {settings.num_rounds} rounds are whole.")
    with ExitStack() as scope:
        bench = set_up(scope, settings, entries, prompts, progress)
        for name, why in bench.skipped.items():
            tell(f"Skipped {name}: {why}")
        for task_id in bench.left_out:
            tell(f"Left out {task_id}: its prompt and {settings.num_new_tokens} tokens do not fit the context.")
        header = {**header, **bench.facts(prompts)}
        for name, facts in header["systems"].items():
            for line in summary.reservations(name, facts):
                tell(line)
        if begun is not None:
            _refuse_differences(begun, header)
        with Writer(output, begun.num_kept_bytes if begun is not None else 0) as writer:
            return _measure(settings, bench, header, begun, writer, progress)


def _entries(settings: RunSettings) -> list[Entry]:
    if not settings.systems:
        raise InvalidRequest("Name at least one system with --systems.", param="systems")
    if len(set(settings.systems)) < len(settings.systems):
        raise InvalidRequest("A system is named twice in --systems; name each once.", param="systems")
    return [registry.find(name, settings.setup) for name in settings.systems]


def _header(settings: RunSettings, prompts: Sequence[Prompt]) -> Record:
    """Return what is known of the run before anything is loaded."""
    origin = provenance()
    return {
        "kind": "run",
        "schema": results_file.SCHEMA,
        "id": f"{origin['time']}-{secrets.token_hex(4)}",
        "benchmark": "run",
        "settings": settings.to_dict(),
        "provenance": origin,
        "prompts": {"sha256": workloads.fingerprint(prompts)},
    }


_ORIGINS = ("commit", "has_uncommitted_changes", "versions")


def _refuse_differences(begun: RunFile, header: Record) -> None:
    """Refuse to go on with a file of another run; compares what `header` knows by now."""
    before, told = begun.header, []
    pairs = [(name, before["settings"].get(name), value) for name, value in header["settings"].items()]
    pairs += [(name, before["provenance"][name], header["provenance"][name]) for name in _ORIGINS]
    pairs += [
        (f"machine {name}", *(each["provenance"]["machine"][name] for each in (before, header)))
        for name in ("cpu", "cores")
    ]
    pairs += [("prompts", before["prompts"]["sha256"], header["prompts"]["sha256"])]
    pairs += [(name, before[name], header[name]) for name in ("models", "skipped", "left_out") if name in header]
    told = [f"{name} was {old}, now {new}" for name, old, new in pairs if old != new]
    if told:
        raise InvalidSettings(
            f"{begun.path} holds another run ({'; '.join(told)}); name another --output, or the same settings."
        )


@dataclass(slots=True)
class Bench:
    """Everything that is loaded and ready."""

    settings: RunSettings
    entries: list[Entry]
    children: dict[str, Child]
    systems: list[System]
    skipped: dict[str, str]
    referee: Child
    tasks: list[Task] = field(default_factory=list[Task])
    left_out: list[str] = field(default_factory=list[str])

    def facts(self, prompts: Sequence[Prompt]) -> Record:
        """Return the part of the header that only loaded models know."""
        categories = {prompt.id: prompt.category for prompt in prompts}
        told = [
            {
                "id": task.id,
                "category": categories[task.id],
                "sha256": hashlib.sha256(str(task.prompt_ids).encode()).hexdigest()[:16],
                "num_prompt_tokens": len(task.prompt_ids),
            }
            for task in self.tasks
        ]
        return {
            "models": self.referee.ask("models"),
            "systems": {entry.name: {**entry.to_dict(), **self._dialect(entry)} for entry in self.entries},
            "skipped": self.skipped,
            "left_out": self.left_out,
            "prefill_chunk_tokens": self.referee.ask("prefill_chunk_tokens"),
            "prompts": {"sha256": workloads.fingerprint(prompts), "tasks": told},
        }

    def _dialect(self, entry: Entry) -> Record:
        """Return how a server is asked; nothing of any other system."""
        return self.children[entry.name].ask("dialect") if entry.is_server else {}

    def context_tokens(self) -> int:
        """Return the committed tokens in the middle of a typical task, where costs are measured."""
        lengths = sorted(len(task.prompt_ids) for task in self.tasks)
        return lengths[len(lengths) // 2] + self.settings.num_new_tokens // 2

    def pids(self) -> list[int]:
        """Return all processes that work for this run."""
        serving = [entry for entry in self.entries if entry.is_ours and "@" in entry.name]
        workers = [pid for entry in serving for pid in self.children[entry.name].ask("pids")]
        return [*(child.pid for child in {*self.children.values(), self.referee}), *workers]

    def margin(self, token_ids: Sequence[int]) -> float:
        """Return how close the target's best two scores are after `token_ids`."""
        sampling = SamplingParams(temperature=self.settings.temperature)
        return self.referee.ask("top2_margin", list(token_ids), sampling, self.settings.seed)


def set_up(
    scope: ExitStack,
    settings: RunSettings,
    entries: Sequence[Entry],
    prompts: Sequence[Prompt],
    progress: Progress,
) -> Bench:
    """Start a process per system, all at once, and encode the prompts; what is not there is skipped."""
    skipped: dict[str, str] = {}
    children: dict[str, Child] = {}
    for entry in entries:
        missing = entry.missing_package()
        if missing is not None:
            skipped[entry.name] = f"the package {missing} is not installed."
        else:
            children[entry.name] = scope.enter_context(Child(entry.name, entry.make(settings.setup)))
    ready: list[Entry] = []
    systems: list[System] = []
    in_process = next((entry.name for entry in entries if entry.is_ours and "@" not in entry.name), None)
    serve = ServeModes(settings.threads, (ServedMode(_REFEREE, registry.PLAIN),), settings.pair)
    referee = children[in_process] if in_process else scope.enter_context(Child(_REFEREE, serve))
    with progress.running("loading", len(children) + (in_process is None)) as tick:
        if in_process is None:
            referee.wait_systems()
            tick(_REFEREE)
        for entry in entries:
            if entry.name in skipped:
                continue
            try:
                systems += children[entry.name].wait_systems()
                ready.append(entry)
            except (MissingExtra, LinkError) as error:
                skipped[entry.name] = str(error)
                del children[entry.name]
            tick(entry.name)
    if not systems:
        raise InvalidRequest(f"Nothing can be measured: {' '.join(f'{n}: {why}' for n, why in skipped.items())}")
    bench = Bench(settings, ready, children, systems, skipped, referee)
    _encode(bench, prompts)
    return bench


def _encode(bench: Bench, prompts: Sequence[Prompt]) -> None:
    settings, context = bench.settings, bench.referee.ask("context")
    sampling = SamplingParams(temperature=settings.temperature)
    for prompt in prompts:
        prompt_ids = bench.referee.ask("encode", prompt.text, settings.is_chat)
        if len(prompt_ids) + settings.num_new_tokens > context:
            bench.left_out.append(prompt.id)
        else:
            text = None if settings.is_chat else prompt.text
            bench.tasks.append(Task(prompt.id, prompt_ids, settings.num_new_tokens, sampling, settings.seed, text))
    if not bench.tasks:
        raise InvalidRequest(f"No prompt fits the context of {context} tokens with its new tokens.", param="prompts")


def _measure(
    settings: RunSettings,
    bench: Bench,
    header: Record,
    begun: RunFile | None,
    writer: Writer,
    progress: Progress,
) -> Found | None:
    """Measure the rounds that are missing and, once all are whole, write the summary."""
    records: list[Record] = []

    def keep(record: Record) -> None:
        writer.add(record)
        records.append(record)

    if begun is None:
        writer.add(header)
    first = begun.num_rounds if begun is not None else 0
    neighbours = Neighbours(bench.pids())
    warm_ups = bench.tasks[:NUM_WARM_UPS]
    steps = len(bench.systems) * (len(warm_ups) + (settings.num_rounds - first) * len(bench.tasks))
    with interrupts_between_runs() as should_stop, progress.running("measuring", steps) as tick:
        was_interrupted = run_round(bench.systems, warm_ups, 0, tick, should_stop) is None
        for number in range(first, settings.num_rounds):
            was_interrupted = was_interrupted or not _one_round(bench, number, tick, should_stop, keep)
            if was_interrupted:
                break
        found = results_file.assembled(begun, header, records)
        if not found.num_rounds:
            return None
        ending = _summary(found, _differences(bench, found), neighbours.share())
        if not was_interrupted:
            writer.add(ending)
    return Found(found, ending, was_interrupted)


def _one_round(bench: Bench, number: int, tick: Tick, should_stop: ShouldStop, keep: Callable[[Record], None]) -> bool:
    """Measure a round and write it down; return whether it is whole."""

    def record(system: str, task: Task, sample: Sample) -> None:
        keep(to_record(number, system, task.id, sample, task.num_tokens))

    if run_round(bench.systems, bench.tasks, number, tick, should_stop, record) is None:
        return False
    for entry in bench.entries:
        if entry.has_costs:
            if should_stop():
                return False
            costs = bench.children[entry.name].ask("costs", bench.context_tokens())
            keep({"kind": "costs", "round": number, "system": entry.name, **costs.to_dict()})
    return True


def _differences(bench: Bench, found: RunFile) -> list[Difference]:
    reference = summary.reference_of(list(found.samples))
    if reference is None:
        return []
    chosen = [name for name in found.samples if name in summary.comparable_texts(found.header)]
    rounds = [
        {name: found.samples[name][number] for name in dict.fromkeys([reference, *chosen])}
        for number in range(found.num_rounds)
    ]
    return differences(bench.tasks, reference, rounds, bench.margin)


def _summary(found: RunFile, listed: Sequence[Difference], neighbours_share: float | None) -> Record:
    return {
        "kind": "summary",
        "id": found.header["id"],
        "is_complete": found.num_rounds == found.header["settings"]["num_rounds"],
        "num_rounds": found.num_rounds,
        "neighbours_share": neighbours_share,
        "systems": summary.summarise(found),
        "skipped": found.header["skipped"],
        "num_differences": len(listed),
        "num_ties": sum(difference.is_tie for difference in listed),
        "differences": [difference.to_dict() for difference in listed],
    }
