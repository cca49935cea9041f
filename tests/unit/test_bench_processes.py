"""Benchmarked systems in processes of their own: what goes over the pipe, errors and a child's end included."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from benchmarks.environment import Neighbours
from benchmarks.processes import Child
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidRequest, InvalidSettings, ResourceError

TASK = Task("task", (1, 2, 3), 5)


@dataclass
class Echo:
    """A system whose every run takes `wall_s`, without taking it."""

    name: str
    wall_s: float

    def generate(self, task: Task) -> Sample:
        return Sample(self.wall_s, task.prompt_ids)


class _Served:
    systems = (Echo("echo", 1.0), Echo("other", 2.0))

    def double(self, number: int) -> int:
        return 2 * number

    def refuse(self) -> None:
        raise InvalidRequest("No.", param="nothing")

    def die(self) -> None:
        raise SystemExit


@contextmanager
def _serve(refusal: str = "") -> Generator[_Served]:
    if refusal:
        raise InvalidSettings(refusal)
    yield _Served()


def test_a_child_does_tasks_answers_questions_and_tells_its_errors():
    with Child("a test", _serve) as child:
        systems = child.wait_systems()
        assert [system.name for system in systems] == ["echo", "other"]
        assert systems[1].generate(TASK) == Sample(2.0, TASK.prompt_ids)
        assert child.ask("double", 21) == 42
        share = Neighbours([child.pid]).share()
        assert share is None or 0 <= share <= 1
        with pytest.raises(InvalidRequest, match="No"):
            child.ask("refuse")


def test_a_child_that_ends_is_told_from_one_that_refuses():
    refusing = partial(_serve, "There is no such model.")
    with Child("a test", refusing) as child, Child("another", _serve) as other:
        with pytest.raises(InvalidSettings, match="no such model"):
            child.wait_systems()
        other.wait_systems()
        with pytest.raises(ResourceError, match="another"):
            other.ask("die")
        with pytest.raises(ResourceError, match="another"):
            other.ask("double", 21)
