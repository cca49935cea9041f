"""`sweep-tree`: the grid holds each shape once, and shapes are ranked over temperatures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.research import tree_shapes as sweep
from benchmarks.settings import Shape
from tests.unit.test_bench_smoke import Echo, _alternate, _result


def _sweep_settings(**changes: object) -> sweep.SweepSettings:
    settings = sweep.SweepSettings((4, 8), (3, 4), (1, 2), (0.0,), 3, 5, 1, 1)
    return replace(settings, **changes)


def test_the_grid_holds_each_shape_once():
    names = [shape.name for shape in _sweep_settings().shapes()]
    assert sorted(names) == sorted(["3/3/1", "4/4/1", "4/3/2", "8/3/2", "8/4/2"])


def test_the_sweep_ranks_shapes_by_their_mean_over_temperatures():
    fast, slow = Shape(4, 3, 2), Shape(3, 3, 1)
    rows: list[sweep.Row] = []
    for temperature, seconds in ((0.0, (0.5, 1.0)), (1.0, (1.0, 0.8))):
        systems = [
            Echo("plain", 2.0),
            *(Echo(s.name, t, result=_result()) for s, t in zip((fast, slow), seconds, strict=True)),
        ]
        rows += sweep.derive([fast, slow], temperature, _alternate(systems, 2)[0])
    found = sweep.Sweep(_sweep_settings(), {}, rows, [], was_interrupted=False)
    assert found.overall() == [(fast, pytest.approx((4 * 2) ** 0.5)), (slow, pytest.approx((2 * 2.5) ** 0.5))]
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["speedup"]["median"] == pytest.approx(4.0)
