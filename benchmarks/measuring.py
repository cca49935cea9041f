"""The course of a measurement, which `run` and `sweep` share: begin or go on with a file, measure blocks, sum up."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks import results_file, workloads
from benchmarks.agreement import Difference, differences
from benchmarks.alternation import ShouldStop, Tick, interrupts_between_runs
from benchmarks.environment import provenance
from benchmarks.neighbours import Neighbours
from benchmarks.processes import Child
from benchmarks.report.console import Progress
from benchmarks.results_file import ResultsFile, Run, Writer
from benchmarks.summary import comparable_texts, reference_of
from benchmarks.systems import Task
from benchmarks.workloads import Prompt
from specsplit.core.errors import InvalidSettings

REFEREE = "the referee"
"""The process that encodes prompts and knows the target's scores."""
Record = dict[str, Any]
Tell = Callable[[str], None]
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


class Bench(Protocol):
    """Everything that a measurement needs, loaded and ready."""

    def facts(self) -> Record:
        """Return the part of the header that only loaded models know."""
        ...

    def pids(self) -> list[int]:
        """Return all processes that work for this measurement."""
        ...

    def num_steps(self, file: ResultsFile) -> int:
        """Return how often `tick` is called until the file is whole."""
        ...

    def warm_up(self, tick: Tick, should_stop: ShouldStop) -> None:
        """Run what is not recorded, before every measurement."""
        ...

    def block(self, number: int, place: int, control: Control) -> list[Record] | None:
        """Measure round `number` at point `place` and write its lines; return them, None if it was interrupted."""
        ...

    def summary(self, file: ResultsFile) -> tuple[Record, list[Record]]:
        """Return the fields of the summary and the differences of texts."""
        ...


@dataclass(frozen=True, slots=True)
class Control:
    """Progress and interruption of a measurement, and the file that takes its lines."""

    tick: Tick
    should_stop: ShouldStop
    write: Callable[[Record], None]


def measure(
    output: Path | None, header: Record, set_up: Callable[[ExitStack], Bench], progress: Progress, tell: Tell
) -> Found | None:
    """Measure, or go on with what `output` holds; None if no block became whole.

    Raises:
        SpecSplitError: the settings do not fit the models or the content of `output`, or it cannot be written.
    """
    begun = _begun(output, header, tell)
    if begun is not None and begun.summary is not None:
        return Found(begun, begun.summary, was_interrupted=False)
    with ExitStack() as scope:
        bench = set_up(scope)
        header |= bench.facts()
        if begun is not None:
            _refuse_differences(begun, header)
        file = begun or ResultsFile(output or Path("this measurement"), header)
        with Writer(output, file.num_kept_bytes) as writer:
            if begun is None:
                writer.add(header)
            return _fill(bench, file, writer, progress)


def _fill(bench: Bench, file: ResultsFile, writer: Writer, progress: Progress) -> Found | None:
    """Measure the blocks that are missing and, once all are whole, write the summary."""
    neighbours = Neighbours(bench.pids())
    was_interrupted = False
    with interrupts_between_runs() as should_stop, progress.running("measuring", bench.num_steps(file)) as tick:
        bench.warm_up(tick, should_stop)
        while len(file.blocks) < file.num_wanted and not was_interrupted:
            place = divmod(len(file.blocks), len(file.points))
            records = bench.block(*place, Control(tick, should_stop, writer.add))
            was_interrupted = records is None
            if records is not None:
                file.blocks.append(records)
        if not file.blocks:
            return None
        found, listed = bench.summary(file)
        last = _ending(file, found, listed, neighbours.share())
        if not was_interrupted:
            writer.add(last)
    return Found(file, last, was_interrupted)


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
        InvalidRequest, InvalidSettings: it is damaged, or of another measurement.
    """
    if output is None or not output.is_file() or not output.stat().st_size:
        return None
    found = results_file.read(output, header["kind"])
    _refuse_differences(found, header)
    if found.is_whole:
        tell(f"{found.path} is whole already; nothing was measured.")
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


def _ending(file: ResultsFile, found: Record, listed: Sequence[Record], share: float | None) -> Record:
    """Return the last line of a file; `listed` are the differences, `share` is the neighbours'."""
    return {
        "kind": "summary",
        "id": file.header["id"],
        "is_complete": len(file.blocks) == file.num_wanted,
        "num_rounds": file.num_rounds,
        "neighbours_share": share,
        **found,
        "skipped": file.header["skipped"],
        "num_differences": len(listed),
        "num_ties": sum(item["is_tie"] for item in listed),
        "differences": list(listed),
    }
