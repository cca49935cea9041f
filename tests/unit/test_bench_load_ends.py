"""What cuts a load short or leaves it empty: a process that ends, a server that fails. The server is made up."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.load import run as load_run
from benchmarks.report import page
from benchmarks.report.tables import Text
from benchmarks.systems import Sample, Task
from specsplit.core.errors import ResourceError, WorkerFailed


class ChildOfServer:
    """The process of a server that serves its loads in turn, fails on all requests of one, or ends."""

    pid = os.getpid()

    def __init__(self, *ends: Exception | None) -> None:
        self._ends = deque(ends)

    def __enter__(self) -> ChildOfServer:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def wait_systems(self) -> None:
        pass

    def ask(self, method: str, *arguments: Any) -> Any:
        if method == "dialect":
            return {}
        end, (load, tasks) = self._ends.popleft(), arguments
        if isinstance(end, ResourceError):
            raise end

        async def send(task: Task) -> Sample:
            if end is not None:
                raise end
            return Sample(0.0, tuple(range(task.num_tokens)), arrivals=((0.0, task.num_tokens),))

        return asyncio.run(load.run(send, tasks))


def _loaded(monkeypatch: pytest.MonkeyPatch, path: Path, *ends: Exception | None) -> tuple[Result, str]:
    """Put loads that end so on a server; return the command's result and the warnings of the report."""
    monkeypatch.setattr(load_run, "Child", lambda name, factory: ChildOfServer(*ends))
    sizes = ["--clients", "1", "--requests", "2", "--prompts", "1", "--new-tokens", "4", "--rounds", "2"]
    sizes += ["--overload", "2", "--arrivals", "3", "--output", str(path)]
    found = CliRunner().invoke(app, ["load", "--url", "http://127.0.0.1:1/v1", *sizes])
    sections = page.build([path], lambda name: None, needs_commit=False) if path.stat().st_size else []
    parts = [part for section in sections for part in section.parts]
    return found, " ".join(part.content for part in parts if isinstance(part, Text) and part.is_warning)


def test_a_load_that_breaks_off_keeps_whole_rounds_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "load.jsonl"
    ends = (WorkerFailed("It was cold."), None, None, None, ResourceError("The process has ended."))
    found, warnings = _loaded(monkeypatch, path, *ends)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (found.exit_code, record["is_complete"], record["num_rounds"]) == (1, False, 1)
    assert [point["systems"]["endpoint"]["num_done"] for point in record["points"]] == [2, 3]
    assert "Not whole: The process has ended." in warnings
    assert "endpoint failed in its warm-up, so its first requests may have been slower: It was cold." in warnings


def test_a_load_that_breaks_off_in_its_first_round_has_no_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found, _ = _loaded(monkeypatch, tmp_path / "load.jsonl", None, None, ResourceError("The process has ended."))
    assert isinstance(found.exception, ResourceError)
    assert (tmp_path / "load.jsonl").read_text(encoding="utf-8") == ""


def test_a_system_that_serves_nothing_gets_no_open_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path, broken = tmp_path / "load.jsonl", WorkerFailed("It broke.")
    found, warnings = _loaded(monkeypatch, path, None, broken, broken, broken, broken)
    assert found.exit_code == 0, found.output
    closed, opened = (point["systems"]["endpoint"] for point in json.loads(found.stdout)["points"])
    assert (closed["num_failed"], closed["over_fewest_clients"]) == (4, None)
    assert (opened["num_failed"], opened["tokens_per_s"]["median"], opened["over_peak"]) == (0, 0.0, None)
    assert "endpoint, T 0, 1 client: 4 requests failed: It broke." in warnings
    assert "open loop: the closed loops of a round served nothing, so nothing was sent." in warnings
