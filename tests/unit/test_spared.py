"""A process of the command line goes without some packages, and never loses one that is in use."""

from __future__ import annotations

import colorsys
import importlib
import importlib.util
import json
import subprocess
import sys

import pytest

from specsplit.cli.spared import spare

_OWN_PROCESS = """
import sys
sys.argv = ["specsplit", "--version"]
from specsplit.cli.main import main
assert main() == 0
import importlib.util
assert importlib.util.find_spec("scipy") is None
"""


def test_a_spared_package_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    name = colorsys.__name__
    monkeypatch.delitem(sys.modules, name)
    spare(name)
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ImportError):
        importlib.import_module(name)


def test_a_package_in_use_stays() -> None:
    spare("json")
    assert sys.modules["json"] is json


def test_a_process_of_the_command_line_takes_no_scipy() -> None:
    done = subprocess.run([sys.executable, "-c", _OWN_PROCESS], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
