"""A start beside other work is measured wrongly; the first quick steps show it, to the worker and whoever asks it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from specsplit.core.types import SamplingParams
from specsplit.engine.measured_times import MeasuredTimes
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import hash_model
from tests.support.rounds import params_of, plain_text

DISTURBED = ((1, 0.026), (5, 0.050), (17, 0.065))


def test_a_quick_step_bounds_its_rows_and_fewer():
    measured = MeasuredTimes(DISTURBED, 0.004, 0.002)
    assert measured.observe(5, 0.008)
    step_times, fork_s, text_token_s = measured.times
    assert dict(step_times) == {**dict(DISTURBED), 5: 0.008}
    assert measured.curve.seconds(1) <= 0.008, "fewer rows take no longer"
    assert measured.curve.seconds(17) <= 4 * 0.008, "nor do more than as many such steps"
    assert fork_s < 0.001, "branches were measured beside the same work"
    assert text_token_s == pytest.approx(fork_s / 2), "and so were texts"
    assert all(earlier[0] < later[0] for earlier, later in pairwise(step_times))


@pytest.mark.parametrize("rows", [1, 4, 17, 33, 200])
def test_steps_as_slow_as_measured_or_slower_change_nothing(rows: int):
    measured = MeasuredTimes(DISTURBED, 0.004)
    for factor in (0.8, 1.0, 9.0):
        assert not measured.observe(rows, factor * measured.curve.seconds(rows))
    assert measured.times == (DISTURBED, 0.004, 0.0)


def test_a_quick_prompt_does_not_make_a_plain_forward_dearer():
    measured = MeasuredTimes(((1, 0.004), (17, 0.010), (33, 0.017)), 0.0)
    assert not measured.observe(512, 0.060), "the last slope was too steep for so many rows"
    assert dict(measured.times[0])[33] == 0.017
    alone = MeasuredTimes(((1, 0.026),), 0.0)
    assert alone.observe(40, 0.012)
    assert alone.curve.seconds(1) == pytest.approx(0.012), "of a start of one size, too"


async def test_a_worker_whose_start_was_disturbed_paces_prompts_by_its_steps(monkeypatch: pytest.MonkeyPatch):
    model, runner = hash_model("target", max_sessions=2, context=64)
    forward, pause_s = runner.forward, [0.02]

    def slow(entries: Sequence[Any]) -> Any:
        time.sleep(pause_s[0])
        return forward(entries)

    monkeypatch.setattr(runner, "forward", slow)
    engine = TargetEngine(model)
    await engine.measure()
    before = (await engine.ping()).step_times
    assert before[0][1] >= 0.02
    pause_s[0] = 0.0
    await engine.check_device()
    assert (await engine.ping()).step_times == before, "a worker that is well forwards nothing"
    await plain_text(engine, [3, 5, 7], params_of(SamplingParams(), 3), 4)
    after = (await engine.ping()).step_times
    assert min(seconds for _, seconds in after) < 0.01
    await engine.aclose()
