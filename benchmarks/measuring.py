"""The steps that `run` and `sweep` share: the file's header, going on with a file, tasks, differences of texts."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import results_file, workloads
from benchmarks.agreement import Difference, differences
from benchmarks.environment import provenance
from benchmarks.processes import Child
from benchmarks.results_file import ResultsFile, Run
from benchmarks.summary import comparable_texts, reference_of
from benchmarks.systems import Task
from benchmarks.workloads import Prompt
from specsplit.core.errors import InvalidSettings
from specsplit.core.types import SamplingParams

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


def begun(output: Path | None, header: Record, tell: Tell) -> ResultsFile | None:
    """Return the content of a file that a measurement goes on with, None if there is none.

    Raises:
        InvalidRequest, InvalidSettings: it is damaged, or of another measurement.
    """
    if output is None or not output.is_file() or not output.stat().st_size:
        return None
    found = results_file.read(output, header["kind"])
    refuse_differences(found, header)
    if found.is_whole:
        tell(f"{found.path} is whole already; nothing was measured.")
    else:
        at = " at single points" if len(found.points) > 1 else ""
        tell(f"Going on with {found.path}: {len(found.blocks)} of {found.num_wanted} rounds{at} are whole.")
    return found


def refuse_differences(file: ResultsFile, header: Record) -> None:
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
    return differences(tasks, reference, rounds, lambda ids: margin(referee, ids, sampling, seed))


def margin(referee: Child, token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> float:
    """Return how close the target's best two scores are after `token_ids`."""
    return referee.ask("top2_margin", list(token_ids), sampling, seed)


def ending(file: ResultsFile, found: Mapping[str, Any], listed: Sequence[Record], share: float | None) -> Record:
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
