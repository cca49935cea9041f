"""What cuts a run short: Ctrl-C, a system that fails, a full disk. The systems are made up, the files are real."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import run as bench
from benchmarks.registry import Entry
from benchmarks.report.console import Progress
from benchmarks.results_file import Writer, read
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidSettings, ResourceError, WorkerUnreachable

TASKS = [Task(f"task-{number}", (1, 2, 3), 4) for number in range(2)]
NUM_ROUNDS, SYSTEMS = 3, ("plain", "generate")
WARM_UPS, PER_ROUND = 4, 4
"""Runs of both systems together."""


class Referee:
    """Answers what a process with the models would."""

    pid = os.getpid()

    def ask(self, method: str, *arguments: Any) -> Any:
        answers = {"models": {"target": {"name": "t"}}, "prefill_chunk_tokens": 512, "top2_margin": 0.5}
        return answers[method]


@dataclass
class Echo:
    """A system that counts, over all systems, the runs so far and then does what the test wants."""

    name: str
    runs: list[str]
    then: Callable[[int], None]

    def generate(self, task: Task) -> Sample:
        self.runs.append(self.name)
        self.then(len(self.runs))
        return Sample(1.0, (1, 2, 3, 4) if self.name == "plain" else (1, 2, 9, 4))


def _nothing(count: int) -> None:
    pass


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bench.Found | None, list[str]]]:
    """Run with made-up systems; `then` is called with the number of every run of a system."""

    def measure(
        path: Path, then: Callable[[int], None] = _nothing, **changes: Any
    ) -> tuple[bench.Found | None, list[str]]:
        runs: list[str] = []
        settings = bench.RunSettings(SYSTEMS, num_prompts=2, num_new_tokens=4, num_rounds=NUM_ROUNDS, **changes)

        def set_up(scope: Any, settings: bench.RunSettings, entries: list[Entry], prompts: Any, progress: Any) -> Any:
            made = [Entry(name, "nowhere", lambda setup: pytest.fail("made")) for name in SYSTEMS]
            loaded = bench.Bench(settings, prompts, Referee())
            loaded.entries = made
            loaded.systems = {name: Echo(name, runs, then) for name in SYSTEMS}
            loaded.names = SYSTEMS
            loaded.tasks = [Task(prompt.id, (1, 2, 3), 4) for prompt in prompts]
            return loaded

        monkeypatch.setattr(bench, "set_up", set_up)
        found = bench.run(settings, path, Progress(Console(quiet=True)), lambda line: None)
        return found, runs

    return measure


Measure = Callable[..., tuple[bench.Found | None, list[str]]]


def test_an_undisturbed_run_is_whole_and_lists_differences(measure: Measure, tmp_path: Path):
    found, runs = measure(tmp_path / "a.jsonl")
    assert found is not None
    assert (len(runs), found.was_interrupted) == (WARM_UPS + NUM_ROUNDS * PER_ROUND, False)
    stored = read(tmp_path / "a.jsonl")
    assert stored.is_whole
    assert stored.summary == found.summary
    assert [(d["system"], d["position"], d["margin"]) for d in found.summary["differences"]] == [
        ("generate", 2, 0.5)
    ] * 2
    assert found.summary["num_compared"] == NUM_ROUNDS * len(TASKS)
    agreement = found.summary["systems"]["generate"]["pooled"]["agreement"]
    assert (agreement["texts"], agreement["tokens_before_the_first_difference"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    "cut", [WARM_UPS + 1, WARM_UPS + PER_ROUND, WARM_UPS + PER_ROUND + 1, WARM_UPS + 2 * PER_ROUND]
)
def test_ctrl_c_keeps_whole_rounds_and_the_same_command_goes_on(measure: Measure, tmp_path: Path, cut: int):
    path = tmp_path / "a.jsonl"

    def interrupt(count: int) -> None:
        if count == cut:
            signal.raise_signal(signal.SIGINT)

    found, runs = measure(path, interrupt)
    whole = (cut - WARM_UPS) // PER_ROUND
    assert len(runs) == cut, "the run that is under way ends"
    assert (found is None) == (whole == 0)
    stored = read(path)
    assert (stored.num_rounds, stored.is_whole) == (whole, False)
    kept = path.read_bytes()[: stored.num_kept_bytes]
    found, runs = measure(path)
    assert found is not None
    assert len(runs) == WARM_UPS + (NUM_ROUNDS - whole) * PER_ROUND, "an unfinished round is measured again"
    assert read(path).is_whole
    assert path.read_bytes().startswith(kept)


def test_a_system_that_fails_leaves_the_whole_rounds(measure: Measure, tmp_path: Path):
    path = tmp_path / "a.jsonl"

    def fail(count: int) -> None:
        if count == WARM_UPS + PER_ROUND + 2:
            raise WorkerUnreachable("It is gone.")

    with pytest.raises(WorkerUnreachable, match="gone"):
        measure(path, fail)
    assert (read(path).num_rounds, read(path).is_whole) == (1, False)
    found, _ = measure(path)
    assert found is not None
    assert found.summary["is_complete"]


def test_a_disk_that_fills_up_leaves_the_whole_rounds(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a.jsonl"
    add = Writer.add

    def full(self: Writer, record: Any) -> None:
        if record.get("round") == 2:
            raise ResourceError(os.strerror(errno.ENOSPC))
        add(self, record)

    monkeypatch.setattr(Writer, "add", full)
    with pytest.raises(ResourceError, match="space"):
        measure(path)
    monkeypatch.undo()
    assert (read(path).num_rounds, read(path).is_whole) == (2, False)


def test_another_measurement_does_not_go_on_with_the_file(measure: Measure, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    measure(path, lambda count: signal.raise_signal(signal.SIGINT) if count == 9 else None)
    before = path.read_bytes()
    with pytest.raises(InvalidSettings, match=r"temperature was 0.0, now 1.0.*threads was 1, now 3"):
        measure(path, threads=3, temperature=1.0)
    assert path.read_bytes() == before
