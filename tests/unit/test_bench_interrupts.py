"""What cuts a run short: Ctrl-C, a system that fails, a full disk. The systems are made up, the files are real."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks import cells, environment, measuring, registry
from benchmarks import run as bench
from benchmarks.registry import Entry
from benchmarks.report.console import Progress
from benchmarks.results_file import Writer, read
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidSettings, ResourceError, WorkerUnreachable
from tests.support.bench_runs import clean_provenance

TASKS = [Task(f"task-{number}", (1, 2, 3), 4) for number in range(2)]
NUM_ROUNDS, SYSTEMS = 3, ("plain", "generate")
QUIET = Progress(Console(quiet=True))
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


def _loaded(settings: bench.RunSettings, prompts: Any, runs: list[str], then: Callable[[int], None]) -> bench.Bench:
    loaded = bench.Bench(settings, prompts, Referee())
    loaded.entries = [Entry(name, "nowhere", lambda setup: pytest.fail("made")) for name in SYSTEMS]
    loaded.systems = {name: Echo(name, runs, then) for name in SYSTEMS}
    loaded.names = SYSTEMS
    loaded.tasks = [Task(prompt.id, (1, 2, 3), 4) for prompt in prompts]
    return loaded


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bench.Found | None, list[str]]]:
    """Run with made-up systems; `then` is called with the number of every run of a system."""
    monkeypatch.setattr(measuring, "provenance", clean_provenance)

    def measure(
        path: Path, then: Callable[[int], None] = _nothing, **changes: Any
    ) -> tuple[bench.Found | None, list[str]]:
        runs: list[str] = []
        settings = bench.RunSettings(SYSTEMS, num_prompts=2, num_new_tokens=4, num_rounds=NUM_ROUNDS, **changes)

        def set_up(scope: Any, settings: bench.RunSettings, entries: Any, prompts: Any, progress: Any) -> bench.Bench:
            return _loaded(settings, prompts, runs, then)

        monkeypatch.setattr(bench, "set_up", set_up)
        found = bench.run(settings, path, QUIET, lambda line: None)
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


@pytest.mark.parametrize("origin", [{"has_uncommitted_changes": True}, {"commit": "unknown"}])
def test_a_run_begun_with_changes_in_no_commit_does_not_go_on(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any]
):
    path, begun = tmp_path / "a.jsonl", clean_provenance() | origin
    monkeypatch.setattr(measuring, "provenance", lambda: begun)
    measure(path, lambda count: signal.raise_signal(signal.SIGINT) if count == 9 else None)
    before = path.read_bytes()
    with pytest.raises(InvalidSettings, match="no commit"):
        measure(path)
    assert path.read_bytes() == before


def test_changes_that_git_does_not_tell_in_time_count_as_changes(monkeypatch: pytest.MonkeyPatch):
    def answer(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "status" in command:
            raise subprocess.TimeoutExpired(command, 10)
        return subprocess.CompletedProcess(command, 0, "c0ffee\n")

    monkeypatch.setattr(subprocess, "run", answer)
    assert environment.commit() == "c0ffee"
    assert not environment.is_clean(environment.provenance())


def test_the_neighbours_of_every_sitting_are_in_the_summary(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for share, cut in ((0.6, WARM_UPS + PER_ROUND), (0.0, None)):
        watch = SimpleNamespace(share=lambda share=share: share)
        monkeypatch.setattr(measuring, "Neighbours", lambda pids, watch=watch: watch)
        found, _ = measure(
            tmp_path / "a.jsonl", lambda count, cut=cut: signal.raise_signal(signal.SIGINT) if count == cut else None
        )
    assert found is not None
    assert found.summary["neighbours_share"] == pytest.approx(0.6 / NUM_ROUNDS)
    assert read(tmp_path / "a.jsonl").summary == found.summary


@pytest.mark.parametrize("name", ["plain@remote", "openai:http://127.0.0.1:1/v1"])
def test_nobody_knows_the_neighbours_of_a_system_elsewhere(name: str):
    settings = bench.RunSettings((name,), target_address="127.0.0.1:1")
    loaded = bench.Bench(settings, [], Referee())
    loaded.entries = [registry.find(name, settings)]
    assert loaded.pids() is None
    assert environment.Neighbours(loaded.pids()).share() is None


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def _fail() -> None:
    raise ResourceError("There is no memory.")


@pytest.mark.parametrize("place", ["loading", "inspecting"])
@pytest.mark.parametrize("stop", [_interrupt, _fail])
def test_what_stops_a_later_cell_leaves_the_whole_ones(
    monkeypatch: pytest.MonkeyPatch, place: str, stop: Callable[[], None]
):
    begun: list[int] = []

    def set_up(scope: Any, settings: bench.RunSettings, entries: Any, prompts: Any, progress: Any) -> bench.Bench:
        begun.append(settings.threads)
        if place == "loading" and settings.threads == 2:
            stop()
        return _loaded(settings, prompts, [], _nothing)

    def inspect(loaded: bench.Bench) -> dict[str, Any]:
        if place == "inspecting" and loaded.settings.threads == 2:
            stop()
        return {}

    monkeypatch.setattr(bench, "set_up", set_up)
    settings = bench.RunSettings(SYSTEMS, num_prompts=2, num_new_tokens=4, num_rounds=NUM_ROUNDS)
    told: list[str] = []
    found = cells.measure(settings, [1, 2, 3], [0.0, 1.0], QUIET, told.append, inspect)
    assert found is not None
    assert begun == [1, 2]
    assert [cell.name for cell in found.cells] == ["T 0, 1 thread", "T 1, 1 thread"]
    assert not found.to_dict()["is_complete"]
    assert ("There is no memory" in " ".join(told)) == (stop is _fail)


def test_an_error_before_the_first_cell_is_whole_is_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "set_up", lambda *arguments: _fail())
    with pytest.raises(ResourceError, match="memory"):
        cells.measure(bench.RunSettings(SYSTEMS, num_prompts=2), [1], [0.0], QUIET, lambda line: None)


def test_ctrl_c_in_the_last_run_leaves_a_whole_file_and_is_told(measure: Measure, tmp_path: Path):
    last = WARM_UPS + NUM_ROUNDS * PER_ROUND
    found, _ = measure(tmp_path / "a.jsonl", lambda count: _interrupt() if count == last else None)
    assert found is not None
    assert (found.was_interrupted, read(tmp_path / "a.jsonl").is_whole) == (True, True)
