"""Records behave as frozen dataclasses do, in all but that nobody stops a program from setting a field."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, fields, replace

import pytest

from specsplit.core.record import record
from specsplit.core.types import Budget, Proposal, Timings, Turn, Verdict


@record
class Point:
    x: int
    y: int = 0
    note: str = field(default="", compare=False)


@record
class Marked(Point):
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: int = 0
    note: str = field(default="", compare=False)


def test_equality_and_hash_are_those_of_the_compared_fields():
    assert Point(1, 2, "a") == Point(1, 2, "b") != Point(2, 1)
    assert hash(Point(1, 2, "a")) == hash(Point(1, 2, "b"))
    assert {Point(1): "one"}[Point(1)] == "one"
    assert Point(1) != Marked(1)
    assert (Point(1) == Frozen(1)) is False
    assert [each.name for each in fields(Point)] == [each.name for each in fields(Frozen)]


def test_they_have_no_room_for_other_fields():
    with pytest.raises(AttributeError):
        Point(1).z = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "made",
    [
        Marked(1, 2, mark="m"),
        Turn("key", 1, 2, 3, 4, (5,)),
        Budget(4, 2),
        Proposal(1, 0, (5,), (0,), (-0.5,), Timings(wall_ms=1.0)),
        Verdict((1,), (5, 6), 3, (1,)),
    ],
    ids=lambda made: type(made).__name__,
)
def test_they_are_copied_pickled_and_replaced(made: object):
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):  # noqa: S301  # type: ignore[type-var]
        assert other == made
        assert hash(other) == hash(made)
