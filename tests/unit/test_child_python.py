"""Processes that this package starts run its own files and Python's, never those of the folder that the user is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specsplit.core.errors import InvalidSettings
from specsplit.model.limited_process import LimitedProcess, Refused
from specsplit.rpc.local_process import LocalProcess

PATHS = {"none": None, "another": "/nowhere", "the current folder, by a colon too many": f"{os.pathsep}/nowhere"}


@pytest.fixture(params=PATHS.values(), ids=PATHS.keys())
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder the current one whose files have the names of Python's own, and say that they were run."""
    for name in ("json", "random", "typing"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w'); raise SystemExit('foreign')\n")
    monkeypatch.chdir(tmp_path)
    if request.param is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", request.param)
    return tmp_path


def test_the_tokenizers_process_runs_no_file_of_the_current_folder(folder: Path) -> None:
    process = LimitedProcess()
    try:
        with pytest.raises(Refused):  # an answer, for which the process has to be there
            process.call({"call": "nothing that it knows"})
    finally:
        process.close()
    assert not (folder / "was_run").exists()


async def test_a_worker_started_here_runs_no_file_of_the_current_folder(folder: Path) -> None:
    process = LocalProcess("The draft", ("no-such-command",))
    with pytest.raises(InvalidSettings, match="No such command"):
        await process.start()
    await process.aclose()
    assert not (folder / "was_run").exists()
