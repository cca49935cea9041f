"""A process of the command line goes without some packages, and never loses one that is in use."""

from __future__ import annotations

import colorsys
import importlib
import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from specsplit.cli.spared import spare, spare_compiler

_OWN_PROCESS = """
import sys
sys.argv = ["specsplit", "--version"]
from specsplit.cli.main import main
assert main() == 0
import importlib.util
assert importlib.util.find_spec("scipy") is None
"""
_COMPILER_AFTER_ALL = """
from specsplit.cli.spared import spare_compiler
spare_compiler()
import torch
from transformers import masking_utils
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
with TransformGetItemToIndex():
    row = torch.vmap(lambda place: torch.arange(3)[place])(torch.arange(3))
assert row.tolist() == [0, 1, 2]
assert torch._dynamo.config.suppress_errors is False
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


def test_what_asks_for_the_compiler_gets_it() -> None:
    program = [sys.executable, "-c", _COMPILER_AFTER_ALL]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def unspared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process that has torch's compiler look like one that has not, and put everything back."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stood_in = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op")
    for name in {*stood_in, *(name for name in sys.modules if name.startswith("torch._dynamo."))}:
        monkeypatch.setitem(sys.modules, name, json)  # so that it is taken away again if it was not there
        del sys.modules[name]


@pytest.mark.usefixtures("unspared")
def test_marks_for_the_compiler_change_and_import_nothing() -> None:
    spare_compiler()
    compiler: Any = sys.modules["torch._dynamo"]
    assert [compiler.allow_in_graph(len), compiler.disable(recursive=False)(len), compiler.disable(len)] == [len] * 3
    assert not hasattr(compiler, "__file__")
    assert sys.modules["torch._dynamo"] is compiler
    assert "torch._dynamo.config" not in sys.modules


@pytest.mark.usefixtures("unspared")
def test_a_process_that_has_the_compiler_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", json)
    before = list(sys.meta_path)
    spare_compiler()
    assert sys.modules["torch._dynamo"] is json
    assert sys.meta_path == before
