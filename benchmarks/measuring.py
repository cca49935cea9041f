"""The course of a measurement, which `run` and `sweep` share: begin or go on with a file, measure blocks, sum up."""

from __future__ import annotations

import hashlib
import secrets
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, TypeVar

from benchmarks import results_file, workloads
from benchmarks.agreement import Difference, differences
from benchmarks.environment import Neighbours, is_clean, provenance
from benchmarks.processes import Child
from benchmarks.report.console import Progress
from benchmarks.results_file import SWEEP, ResultsFile, Run, Writer
from benchmarks.settings import Setup
from benchmarks.summary import comparable_texts, num_compared, reference_of
from benchmarks.systems import Sample, Task, to_record
from benchmarks.workloads import Prompt
from specsplit.core.errors import InvalidSettings
from specsplit.core.types import SamplingParams

REFEREE = "the referee"
"""The process that encodes prompts and knows the target's scores."""
Record = dict[str, Any]
Tell = Callable[[str], None]
T = TypeVar("T")
Tick = Callable[[str], None]
"""Called with a system's name when it has done a task."""
ShouldStop = Callable[[], bool]
"""Asked between any two runs."""
_ORIGINS = ("commit", "has_uncommitted_changes", "versions")
_MACHINE = ("cpu", "cores")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a measurement; there is at least one whole block."""

    file: ResultsFile
    summary: Record
    was_interrupted: bool

    @property
    def whole_file(self) -> ResultsFile:
        """Return the file with its summary, which an interrupted measurement does not write."""
        return replace(self.file, summary=self.summary)


class Bench(ABC):
    """Everything that a measurement needs, loaded and ready: systems that take turns, at every point alike."""

    num_warm_ups = 1
    """Batches of each point that are not recorded, before every measurement."""

    def __init__(self, names: Sequence[str], tasks: Sequence[Task], referee: Child) -> None:
        self.names, self.tasks, self.referee = names, tasks, referee

    @abstractmethod
    def facts(self) -> Record:
        """Return the part of the header that only loaded models know."""

    @abstractmethod
    def pids(self) -> list[int] | None:
        """Return all processes that work for this measurement; None if some of them are not ours."""

    @abstractmethod
    def run(self, place: int, name: str, tasks: Sequence[Task]) -> tuple[list[Sample], Record]:
        """Have a system do the tasks at once at a point; return the samples, and the facts of a line of `batch`."""

    @abstractmethod
    def costs(self, place: int) -> list[Record]:
        """Measure the costs at a point that has any; return the facts of the lines of `costs`."""

    @abstractmethod
    def summary(self, file: ResultsFile) -> tuple[Record, list[Record]]:
        """Return the fields of the summary and the differences of texts."""

    def at(self, point: Record) -> list[Task]:
        """Return the tasks under the temperature of `point`."""
        return [replace(task, sampling=SamplingParams(temperature=point["temperature"])) for task in self.tasks]

    def batches(self, point: Record) -> list[list[Task]]:
        """Return the tasks that run at once at `point`, batch after batch."""
        tasks, size = self.at(point), point["concurrency"]
        return [tasks[first : first + size] for first in range(0, len(tasks), size)]

    def num_steps(self, file: ResultsFile) -> int:
        """Return how often `tick` is called until the file is whole."""
        batches = [self.batches(point) for point in file.points]
        missing = range(len(file.blocks), file.num_wanted)
        warm_ups = sum(len(each[: self.num_warm_ups]) for each in batches)
        return len(self.names) * (warm_ups + sum(len(batches[number % len(batches)]) for number in missing))

    def warm_up(self, file: ResultsFile, tick: Tick, should_stop: ShouldStop) -> None:
        """Run what is not recorded, before every measurement."""
        for place, point in enumerate(file.points):
            for number, tasks in enumerate(self.batches(point)[: self.num_warm_ups]):
                for name in running_order(self.names, 0, number):
                    if not should_stop():
                        self.run(place, name, tasks)
                        tick(name)

    def block(self, file: ResultsFile, tick: Tick, should_stop: ShouldStop) -> list[Record] | None:
        """Measure the next round at the next point and return its lines; None if it was interrupted."""
        number, place = divmod(len(file.blocks), len(file.points))
        here = {"round": number, **({"point": place} if file.header["kind"] == SWEEP else {})}
        records: list[Record] = []
        for batch, tasks in enumerate(self.batches(file.points[place])):
            for name in running_order(self.names, number, batch):
                if should_stop():
                    return None
                samples, facts = self.run(place, name, tasks)
                lines = [
                    {**to_record(number, name, task.id, sample, task.num_tokens), **here}
                    for task, sample in zip(tasks, samples, strict=True)
                ]
                records += lines
                if facts:
                    made = sum(line["num_tokens"] for line in lines)
                    records.append(
                        {"kind": "batch", **here, "system": name, "batch": batch, **facts, "num_tokens": made}
                    )
                tick(name)
        if len(records) == file.block_size(place):
            return records
        if should_stop():
            return None
        return [*records, *({"kind": "costs", **here, **facts} for facts in self.costs(place))]


def running_order(systems: Sequence[T], round_number: int, task_number: int) -> list[T]:
    """Return the systems in an order that turns round every other round and rotates with the task and every two rounds.

    So for each task each system has each place as often, and is preceded by each of its neighbours.
    """
    start = (round_number // 2 + task_number) % len(systems)
    rotated = [*systems[start:], *systems[:start]]
    return rotated[::-1] if round_number % 2 else rotated


@contextmanager
def interrupts_between_runs() -> Generator[ShouldStop]:
    """Let the first Ctrl-C end the measurement after the run that is under way, and the second one everything."""
    seen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def measure(
    output: Path | None, header: Record, set_up: Callable[[ExitStack], Bench], progress: Progress, tell: Tell
) -> Found | None:
    """Measure, or go on with what `output` holds; None if no block became whole.

    Raises:
        SpecSplitError: the settings do not fit the models or the content of `output`, or it cannot be written.
    """
    with ExitStack() as scope:
        # Locked before it is read: another run would add rounds while this one loads, which this one would cut off.
        writer = scope.enter_context(Writer(output))
        begun = _begun(output, header, tell)
        if begun is not None and begun.summary is not None:
            return Found(begun, begun.summary, was_interrupted=False)
        bench = set_up(scope)
        header |= bench.facts()
        if begun is not None:
            _refuse_differences(begun, header)
        file = begun or ResultsFile(output or Path("this measurement"), header)
        writer.cut(file.num_kept_bytes)
        if begun is None:
            writer.add(header)
        return _fill(bench, file, writer, progress)


def _fill(bench: Bench, file: ResultsFile, writer: Writer, progress: Progress) -> Found | None:
    """Measure the blocks that are missing and, once all are whole, write the summary."""
    was_interrupted = False
    with interrupts_between_runs() as should_stop, progress.running("measuring", bench.num_steps(file)) as tick:
        bench.warm_up(file, tick, should_stop)
        while len(file.blocks) < file.num_wanted and not was_interrupted:
            neighbours = Neighbours(bench.pids())
            records = bench.block(file, tick, should_stop)
            was_interrupted = records is None
            if records is not None:
                records[-1]["neighbours_share"] = neighbours.share()
                for record in records:
                    writer.add(record)
                file.blocks.append(records)
        if not file.blocks:
            return None
        found, listed = bench.summary(file)
        last = _ending(file, found, listed)
        if not was_interrupted:
            writer.add(last)
    return Found(file, last, was_interrupted or should_stop())


def new_header(kind: str, settings: Record, prompts: Sequence[Prompt]) -> Record:
    """Return the facts of a measurement that are known before anything is loaded."""
    origin = provenance()
    return {
        "kind": kind,
        "schema": results_file.SCHEMA,
        "id": f"{origin['time']}-{secrets.token_hex(4)}",
        "benchmark": kind,
        "settings": settings,
        "provenance": origin,
        "prompts": {"sha256": workloads.fingerprint(prompts)},
    }


def _begun(output: Path | None, header: Record, tell: Tell) -> ResultsFile | None:
    """Return the content of a file that a measurement goes on with, None if there is none.

    Raises:
        InvalidRequest, InvalidSettings: it is damaged, of another measurement, or of changes that are in no commit.
    """
    if output is None or not output.is_file() or not output.stat().st_size:
        return None
    found = results_file.read(output, header["kind"])
    _refuse_differences(found, header)
    if found.is_whole:
        tell(f"{found.path} is whole already; nothing was measured.")
    elif not is_clean(header["provenance"]):
        raise InvalidSettings(
            f"{found.path} was begun with changes that are in no commit, so nobody knows whether they are still the "
            "same; commit them, and name another --output."
        )
    else:
        at = " at single points" if len(found.points) > 1 else ""
        tell(f"Going on with {found.path}: {len(found.blocks)} of {found.num_wanted} rounds{at} are whole.")
    return found


def _refuse_differences(file: ResultsFile, header: Record) -> None:
    """Refuse to go on with a file of another measurement; compares the fields that `header` has by now.

    Raises:
        InvalidSettings: naming every difference.
    """
    before = file.header
    pairs = [(name, before["settings"].get(name), value) for name, value in header["settings"].items()]
    origins = [each["provenance"] for each in (before, header)]
    pairs += [(name, *(each[name] for each in origins)) for name in _ORIGINS]
    pairs += [(f"machine {name}", *(each["machine"][name] for each in origins)) for name in _MACHINE]
    pairs += [("prompts", before["prompts"]["sha256"], header["prompts"]["sha256"])]
    pairs += [(name, before.get(name), header[name]) for name in ("models", "skipped", "left_out") if name in header]
    listed = [f"{name} was {old}, now {new}" for name, old, new in pairs if old != new]
    if listed:
        raise InvalidSettings(
            f"{file.path} holds another {before['kind']} ({'; '.join(listed)}); name another --output, or the same "
            "settings."
        )


def prompt_facts(tasks: Sequence[Task], prompts: Sequence[Prompt]) -> Record:
    """Return the prompts as a results file names them."""
    categories = {prompt.id: prompt.category for prompt in prompts}
    listed = [
        {
            "id": task.id,
            "category": categories[task.id],
            "sha256": hashlib.sha256(str(task.prompt_ids).encode()).hexdigest()[:16],
            "num_prompt_tokens": len(task.prompt_ids),
        }
        for task in tasks
    ]
    return {"sha256": workloads.fingerprint(prompts), "tasks": listed}


def encoded(
    referee: Child, prompts: Sequence[Prompt], setup: Setup, *, is_chat: bool = False
) -> tuple[list[Task], list[str]]:
    """Return the tasks that fit the context, and the names of the prompts that do not."""
    context, tasks = referee.ask("context"), list[Task]()
    for prompt in prompts:
        prompt_ids = referee.ask("encode", prompt.text, is_chat)
        if len(prompt_ids) + setup.num_new_tokens <= context:
            text = None if is_chat else prompt.text
            tasks.append(Task(prompt.id, prompt_ids, setup.num_new_tokens, seed=setup.seed, text=text))
    fitting = {task.id for task in tasks}
    return tasks, [prompt.id for prompt in prompts if prompt.id not in fitting]


def context_tokens(tasks: Sequence[Task]) -> int:
    """Return the committed tokens in the middle of a typical task, the context in which costs are measured."""
    lengths = sorted(len(task.prompt_ids) for task in tasks)
    return lengths[len(lengths) // 2] + tasks[0].num_tokens // 2


def differences_of(run: Run, tasks: Sequence[Task], referee: Child) -> list[Difference]:
    """Return the differences from the reference's text; margins are those of the tasks' sampling."""
    reference = reference_of(list(run.samples))
    if reference is None:
        return []
    sampling, seed = tasks[0].sampling, tasks[0].seed
    comparable = comparable_texts(run.header)
    chosen = dict.fromkeys([reference, *(name for name in run.samples if name in comparable)])
    rounds = [{name: run.samples[name][number] for name in chosen} for number in range(run.num_rounds)]
    return differences(tasks, reference, rounds, lambda ids: referee.ask("top2_margin", list(ids), sampling, seed))


def _ending(file: ResultsFile, found: Record, listed: Sequence[Record]) -> Record:
    """Return the last line of a file; `listed` are the differences."""
    shares = [block[-1]["neighbours_share"] for block in file.blocks]
    return {
        "kind": "summary",
        "id": file.header["id"],
        "is_complete": len(file.blocks) == file.num_wanted,
        "num_rounds": file.num_rounds,
        "neighbours_share": None if None in shares else fmean(shares),
        **found,
        "skipped": file.header["skipped"],
        "num_compared": sum(num_compared(file.run(place)) for place in file.measured_points),
        "num_differences": len(listed),
        "num_ties": sum(item["is_tie"] for item in listed),
        "differences": list(listed),
    }
