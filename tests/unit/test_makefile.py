"""The environment that make builds: one that cannot be used is built anew, and an old Python is named in a sentence."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.forked import ROOT


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _make(venv: Path, python: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", f"VENV={venv}", f"PYTHON={python}", f"{venv}/.runs"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_old_python_is_refused_in_one_sentence(tmp_path: Path):
    done = _make(tmp_path / "venv", _script(tmp_path / "python3", "exit 1"))
    assert done.returncode != 0
    assert f"needs Python 3.11 or later, and {tmp_path}/python3 is older" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_environment_without_pip_is_built_anew(tmp_path: Path):
    venv = tmp_path / "venv"
    broken = _script(venv / "bin" / "python", "exit 1")
    whole = _script(tmp_path / "whole", "exit 0")
    python = _script(tmp_path / "python3", f'if [ "$1" = -m ]; then cp {whole} {broken}; fi')
    done = _make(venv, python)
    assert done.returncode == 0, done.stderr
    assert broken.read_text() == whole.read_text()
    assert (venv / ".runs").exists()


def test_an_environment_that_cannot_be_built_leaves_nothing(tmp_path: Path):
    venv = tmp_path / "venv"
    python = _script(tmp_path / "python3", f'if [ "$1" = -m ]; then mkdir {venv}; exit 1; fi')
    assert _make(venv, python).returncode != 0
    assert not venv.exists()
