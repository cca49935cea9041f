"""A process of the command line goes without some packages, and never loses one that is in use."""

from __future__ import annotations

import colorsys
import importlib
import importlib.util
import json
import sys

import pytest

from specsplit.cli.spared import spare


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
