"""A process that is started here and hangs while it loads is ended, and started again if it has served before."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from specsplit.core.errors import InvalidSettings, SpecSplitError, WorkerFailed
from specsplit.rpc import hang, local_process
from specsplit.rpc.local_process import LocalProcess, running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whether a process works")

LIMIT_S = 60
HANGING = "import time; time.sleep(600)"
SECOND_HANGS = """
import json, pathlib, sys, time
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x")
if len(starts.read_text()) == 2:
    time.sleep(600)
print(json.dumps({"address": "127.0.0.1:1"}), flush=True)
if len(starts.read_text()) > 2:
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("STALLED_S", 1.0), ("LOOK_S", 0.1), ("STILL_LOADING_S", 0.5)):
        monkeypatch.setattr(hang, name, seconds)


def run_instead(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_process, "python_command", lambda module: [sys.executable, "-c", code])


async def test_one_that_hangs_while_it_loads_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_instead(HANGING, monkeypatch)
    caplog.set_level(logging.INFO)
    process = LocalProcess("The target", ())
    with pytest.raises(WorkerFailed, match="The target ended before it served: it used no processor"):
        async with asyncio.timeout(LIMIT_S):
            await process.start()
    await process.aclose()
    assert any("The target is still loading" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("code", "kind"), [(1, WorkerFailed), (2, InvalidSettings)])
async def test_one_that_finds_its_settings_wrong_says_so(
    code: int, kind: type[SpecSplitError], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(f"import sys; sys.stderr.write('Error: It is wrong.'); sys.exit({code})", monkeypatch)
    process = LocalProcess("The target", ())
    with pytest.raises(kind, match=r"^The target ended before it served: It is wrong\.$"):
        await process.start()
    await process.aclose()


async def test_one_that_hangs_when_it_is_started_again_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(SECOND_HANGS, monkeypatch)
    starts, num_served, served_again = tmp_path / "starts", 0, asyncio.Event()
    starts.write_text("")

    def note(words: str) -> None:
        nonlocal num_served
        num_served += "serves at" in words
        if num_served == 2:
            served_again.set()

    async with asyncio.timeout(LIMIT_S), running([LocalProcess("The target", (str(starts),), note)]):
        await served_again.wait()
    assert len(starts.read_text()) >= 3


async def test_one_that_works_is_left_alone_however_long_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(
        "import json, time; end = time.process_time() + 2\n"
        "while time.process_time() < end: pass\n"
        "print(json.dumps({'address': '127.0.0.1:1'}), flush=True); time.sleep(600)",
        monkeypatch,
    )
    process = LocalProcess("The target", ())
    async with asyncio.timeout(LIMIT_S):
        await process.start()
    await process.aclose()
