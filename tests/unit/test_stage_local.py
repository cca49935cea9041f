"""Stage processes of this machine that say what no stage says: an error for whoever starts them, and never the end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import pytest

from specsplit.core.errors import WorkerFailed
from specsplit.rpc import local_process
from specsplit.stages import local as local_stages
from tests.support.rpc_servers import wait_until

READY = json.dumps({"address": "127.0.0.1:7777"})
FAILS = "import sys; print(sys.argv[1], file=sys.stderr)"
WAITS = "import sys, time; print(sys.argv[1], flush=True); time.sleep(60)"
ENDS = "import sys; print(sys.argv[1], flush=True)"


class Starts:
    """Starts, instead of stages, the given programs in turn, each with the line that it prints."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *programs: tuple[str, str], longest_pause_s: float = 0.01
    ) -> None:
        self.processes: list[asyncio.subprocess.Process] = []
        self._programs, self._start = list(programs), asyncio.create_subprocess_exec
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self._start_next)
        monkeypatch.setattr(local_process, "PAUSES_S", (0.01, longest_pause_s))

    async def _start_next(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        program, line = self._programs.pop(0)
        process = await self._start(sys.executable, "-I", "-S", "-c", program, line, **options)
        self.processes.append(process)
        return process


@pytest.mark.parametrize("line", ["a library says hello", "[1]", "{}", '{"address": 7}', "x" * 100_000])
async def test_a_process_whose_first_line_is_no_ready_line_is_refused_and_ended(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_process, "LINE_BYTES", 1 << 10)
    starts = Starts(monkeypatch, (WAITS, line))
    async with asyncio.timeout(20):
        with pytest.raises(WorkerFailed, match=r"Stage 0 \(layers 0:1\) did not say where it serves"):
            async with local_stages.local_stages(["0:1"], ()):
                pass
    assert starts.processes[0].returncode is not None


async def test_why_a_process_does_not_serve_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Starts(monkeypatch, (FAILS, "Error: There is no model folder at ./x."))
    notes: list[str] = []
    async with asyncio.timeout(20):
        with pytest.raises(WorkerFailed, match=r"ended before it served: There is no model folder at \./x\.$"):
            async with local_stages.local_stages(["0:1"], (), notes.append):
                pass
    assert notes == []


async def test_a_stage_that_restarts_with_other_output_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = Starts(monkeypatch, (ENDS, READY), (WAITS, "a library says hello"), (WAITS, READY))
    notes: list[str] = []
    async with asyncio.timeout(20), local_stages.local_stages(["0:1"], (), notes.append) as addresses:
        await wait_until(lambda: sum("serves at" in note for note in notes) == 2)
        assert addresses == ["127.0.0.1:7777"]
        assert [process.returncode is None for process in starts.processes] == [False, False, True]
    assert starts.processes[2].returncode is not None


async def test_a_stage_that_keeps_dying_is_started_again_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Starts(monkeypatch, *[(ENDS, READY)] * 5, (WAITS, READY), longest_pause_s=0.04)
    notes: list[str] = []
    async with asyncio.timeout(20), local_stages.local_stages(["0:1"], (), notes.append):
        await wait_until(lambda: sum("serves at" in note for note in notes) == 6)
    assert re.findall(r"starting it again in (\S+) s", caplog.text) == ["0.01", "0.02", "0.04", "0.04", "0.04"]


async def test_stages_started_here_see_no_settings_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPECSPLIT_STAGE_KV_MEMORY", "specsplit_stage_threads", "SPECSPLIT_CONFIG", "SPECSPLIT_DEBUG"):
        monkeypatch.setenv(name, "1")
    Starts(monkeypatch, ("import os, sys; print(*os.environ, file=sys.stderr)", ""))
    async with asyncio.timeout(20):
        with pytest.raises(WorkerFailed, match="ended before it served") as failed:
            async with local_stages.local_stages(["0:1"], ()):
                pass
    assert re.findall(r"(?i)SPECSPLIT_(?!TEST_)\w+", str(failed.value)) == ["SPECSPLIT_DEBUG"]
