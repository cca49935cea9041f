"""What `make house` counts, shown on small examples."""

from __future__ import annotations

import runpy
import threading
from pathlib import Path

import pytest

from tools.house import exceptions, measure
from tools.house.imports import circles
from tools.house.prose import fragments
from tools.house.route import Recorder
from tools.house.sizes import attributes, num_parameters
from tools.house.sources import Source, classes, functions
from tools.house.testing import private_reads

CLASS = """
class Engine:
    def __init__(self, model, *queues, clock=None):
        self.model, self._queue = model, queues
        self._clock: Clock = clock

    @staticmethod
    def load(path, *, threads): ...

    def step(self):
        self._clock = self.other.field = 1
"""


def _source(text: str, name: str = "specsplit/x.py") -> Source:
    return Source(name, text)


def test_a_class_has_the_attributes_that_its_methods_assign():
    (engine,) = classes(_source(CLASS))
    assert attributes(engine) == {"model", "_queue", "_clock"}


def test_parameters_count_without_self_and_without_stars():
    source = _source(CLASS)
    (engine,) = classes(source)
    assert {node.name: num_parameters(node, engine) for node in functions(source)} == {
        "__init__": 2,
        "load": 2,
        "step": 0,
    }


def test_circles_are_groups_that_reach_one_another():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert circles(graph) == ["a <-> b <-> c"]


@pytest.mark.parametrize(
    ("text", "count"),
    [('"""Of an answer."""', 1), ('x = 1\n"""What it is."""', 1), ('"""Offers a tree."""', 0), ('x = "Of it"', 0)],
)
def test_fragments_are_found_in_every_kind_of_docstring(text: str, count: int):
    assert len(list(fragments(_source(text)))) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("engine._slots", 1),
        ("self._slots", 0),
        ("import os\nos._exit(1)", 0),
        ("record._replace(a=1)", 0),
        ('monkeypatch.setattr("specsplit.x._LIMIT_S", 1)', 1),
        ("from specsplit.x import _LIMIT_S", 1),
    ],
)
def test_private_reads_are_told_from_a_tests_own(text: str, count: int):
    assert len(list(private_reads(_source(text)))) == count


def test_a_coroutine_that_goes_on_is_one_call(tmp_path: Path):
    module = tmp_path / "work.py"
    module.write_text("def numbers():\n    yield from range(3)\n\ndef run():\n    return [x for x in numbers()]\n")
    names = runpy.run_path(str(module))
    recorder = Recorder(tmp_path)
    threading.setprofile(recorder)
    try:
        recorder.begin_round()
        thread = threading.Thread(target=names["run"])
        thread.start()
        thread.join()
        recorder.begin_round()
    finally:
        threading.setprofile(None)
    assert recorder.rounds[0].calls == {("work.py", "run"): 1, ("work.py", "numbers"): 1}
    assert recorder.rounds[0].num_files == 1


def test_the_table_marks_what_is_missed_and_lists_its_places():
    measures = [measure.at_most("lines", 70, 60, ["a.py", "b.py"]), measure.none_of("circles", [])]
    lines = measure.table(measures, 1).splitlines()
    assert lines[1].split() == ["MISS", "lines", "70", "<=", "60"]
    assert lines[2].split() == ["ok", "circles", "0", "0"]
    assert lines[-2:] == ["  a.py", "  ... and 1 more (--all lists them)"]


def test_exceptions_are_few():
    assert len(exceptions.EXCEPTIONS) <= exceptions.MAX_EXCEPTIONS
